"""Degrees for fixed packs of one wave: the paper's dynamic programme, and the same answer by threshold.

Both take a table of seconds and return degrees; packing and placement happen elsewhere.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import InfeasibleError

Array = npt.NDArray[np.float64]
Degrees = tuple[int, ...]


def dynamic_programme(table_s: Array) -> Degrees:
    """Degrees of least makespan by the paper's two-dimensional dynamic programme.

    DP[i][j] = min over d of max(DP[i-1][j-d], T(G_i, d)): the least makespan of the first i packs on at
    most j ranks. Ranks may stay idle, so T need not fall with d.

    Complexity: O(K·N²) time, O(N² + K·N) memory.

    Args:
        table_s: seconds, shape (K, N); column d - 1 is degree d; infinite where memory forbids.

    Raises:
        InfeasibleError: the least degrees sum to more than N.

    >>> dynamic_programme(np.array([[8.0, 4.0, 3.0], [3.0, 2.0, 2.0]]))
    (2, 1)
    """
    num_packs, ranks = table_s.shape
    before = np.arange(ranks + 1)[:, None] - np.arange(1, ranks + 1)  # j - d
    allowed = before >= 0
    best = np.zeros(ranks + 1)
    choice = np.zeros((num_packs, ranks + 1), dtype=np.int64)
    for i in range(num_packs):
        spans = np.where(allowed, np.maximum(best[before], table_s[i]), np.inf)
        choice[i] = spans.argmin(axis=1)
        best = spans.min(axis=1)
    if not np.isfinite(best[ranks]):
        raise _too_many(table_s)
    degrees, left = [], ranks
    for i in reversed(range(num_packs)):
        degrees.append(int(choice[i, left]) + 1)
        left -= degrees[-1]
    return tuple(reversed(degrees))


def threshold(table_s: Array) -> Degrees:
    """Degrees of least makespan by bisection over the times that occur; then the fewest ranks.

    For a target, each pack takes its least degree with T <= target; the target is met iff those degrees
    sum to at most N. Equal to the dynamic programme in makespan, also where T is not monotone, since the
    least degree is sought directly.

    Complexity: O(K·N·log(K·N)).

    Args:
        table_s: as in `dynamic_programme`.

    Raises:
        InfeasibleError: the least degrees sum to more than N.

    >>> threshold(np.array([[8.0, 4.0, 3.0], [3.0, 2.0, 2.0]]))
    (2, 1)
    """
    ranks = table_s.shape[1]
    # The makespan is at least the largest best time, so smaller candidates need no look.
    floor = table_s.min(axis=1).max()
    candidates = np.unique(table_s[(table_s >= floor) & np.isfinite(table_s)])
    low, high = 0, len(candidates) - 1
    if high < 0 or least_degrees(table_s, candidates[high]).sum() > ranks:
        raise _too_many(table_s)
    while low < high:
        middle = (low + high) // 2
        if least_degrees(table_s, candidates[middle]).sum() <= ranks:
            high = middle
        else:
            low = middle + 1
    return tuple(least_degrees(table_s, candidates[low]).tolist())


def least_degrees(table_s: Array, target_s: float | Array) -> npt.NDArray[np.int64]:
    """Least degree of each pack with T <= target; every pack must have one. Shape (K,)."""
    return np.asarray((table_s <= target_s).argmax(axis=1) + 1)


def _too_many(table_s: Array) -> InfeasibleError:
    least = [int(np.isfinite(row).argmax()) + 1 if np.isfinite(row).any() else 0 for row in table_s]
    return InfeasibleError(
        f"{len(least)} packs need {sum(least)} ranks at a time, there are {table_s.shape[1]}",
        "Spread the packs over more waves.",
    )
