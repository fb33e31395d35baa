"""Least degrees for many samples at once: the question every search of the planner asks.

For a limit, the least number of ranks on which a sample runs no longer than that. Memory is linear in the
samples: no table of all samples by all degrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flexcp.cost.model import CostModel
from flexcp.planner.problem import Array, Integers, Problem

# Degrees are tabled up to this many entries in all; beyond them, degrees are searched.
_TABLE_ENTRIES = 1 << 17
_NEAR_BEST = 1.05


@dataclass(frozen=True)
class Ladder:
    """Times of some loads at any degree, for questions about the least degree.

    Up to `tabled` degrees, at least those inside a node, times lie in a table, of which the prefix minimum
    is kept: the least degree with T <= limit is the first at which the prefix minimum is.
    Beyond, all groups cross nodes, and T is quasi-convex in d. Proof: T is the larger of two branches plus
    pack_s. Computation, (a + t) / d + (d - 1) r, is convex. Communication, c - c / d + (d - 1)(l + r) +
    t / d, is convex for t >= c and rises for t < c. So both are quasi-convex, and so is the larger. Its
    lowest point is found by bisecting the slope, and a limit by bisecting the falling part. (All-to-all
    falls for d >= 3.)

    Complexity: O(M · tabled) memory; O(M · (tabled + log N)) time a question.

    Attributes:
        columns: shape (6, M), the fields of `Load`.
        least: degree that memory asks for, of each load.
        ranks, ranks_per_node: N, and where groups begin to cross nodes.
    """

    cost: CostModel
    columns: Array
    least: Integers
    ranks: int
    ranks_per_node: int

    @cached_property
    def tabled(self) -> int:
        """Number of degrees in the table."""
        most = max(self.ranks_per_node, _TABLE_ENTRIES // max(1, len(self.least)))
        return min(self.ranks, most)

    @cached_property
    def _table_s(self) -> Array:
        """Prefix minimum over degrees 1..tabled; infinite below the least degree."""
        degree = np.arange(1, self.tabled + 1)
        times_s = self.cost.seconds(self.columns[:, :, None], degree, degree > self.ranks_per_node)
        times_s = np.where(degree < self.least[:, None], np.inf, times_s)
        return np.minimum.accumulate(times_s, axis=1)

    def times_s(self, degrees: Integers, which: Integers | slice = slice(None)) -> Array:
        """Seconds at one degree each."""
        return self.cost.seconds(self.columns[:, which], degrees, degrees > self.ranks_per_node)

    @cached_property
    def _first_beyond(self) -> Integers:
        return np.maximum(self.least, self.tabled + 1)

    @cached_property
    def _lowest_beyond(self) -> Integers:
        """Degree beyond the table at which T is lowest."""
        low, high = self._first_beyond.copy(), np.full_like(self.least, self.ranks)
        while (low < high).any():
            middle = (low + high) // 2
            falls = self.times_s(middle + 1) < self.times_s(middle)
            low, high = np.where(falls, middle + 1, low), np.where(falls, high, middle)
            low = np.minimum(low, high)
        return low

    @cached_property
    def best_s(self) -> Array:
        """Least time over all degrees."""
        inside = self._table_s[:, -1]
        if self.tabled == self.ranks:
            return inside
        return np.minimum(inside, self.times_s(self._lowest_beyond))

    def degrees(self, limits_s: Array | float) -> Integers:
        """Least degree of each load with T <= its limit; no limit may be below `best_s`."""
        limits_s = np.broadcast_to(np.asarray(limits_s), self.least.shape)
        # Counting is what finds the first entry of a falling row.
        found: Integers = (self._table_s > limits_s[:, None]).sum(axis=1) + 1
        far = np.flatnonzero(found > self.tabled)
        if len(far):
            found[far] = self._search(far, limits_s[far])
        return found

    def _search(self, which: Integers, limits_s: Array) -> Integers:
        low, high = self._first_beyond[which], self._lowest_beyond[which]
        while (low < high).any():
            middle = (low + high) // 2
            meets = self.times_s(middle, which) <= limits_s
            low, high = np.where(meets, low, middle + 1), np.where(meets, middle, high)
            low = np.minimum(low, high)
        return low


def ladder(problem: Problem, columns: Array, least: Integers) -> Ladder:
    """Ladder of any loads on the cluster of a problem."""
    return Ladder(problem.cost, columns, least, problem.ranks, problem.cluster.ranks_per_node)


@dataclass(frozen=True)
class LongSamples:
    """The samples that may need more than one rank: those that memory or a limit can split.

    Attributes:
        index: their positions in the problem, ascending.
        ladder: their times.
        best_s: their least times.
        others_work_s: `work_s` of all other samples together.
    """

    index: Integers
    ladder: Ladder
    others_work_s: float

    @property
    def best_s(self) -> Array:
        """Least time of each."""
        return self.ladder.best_s

    @property
    def near_best_s(self) -> Array:
        """What a sample may take that cannot meet a limit: ranks beyond that bring little."""
        return _NEAR_BEST * self.best_s


def long_samples(problem: Problem, above_s: float) -> LongSamples:
    """Samples that take more than `above_s` on one rank, or more than one rank by memory."""
    least = -(-problem.counts[:, 0] // problem.cluster.tokens_per_rank)
    alone_s = problem.work_s + problem.cost.pack_s
    index = np.flatnonzero((least > 1) | (alone_s > above_s))
    others = problem.counts.sum(axis=0) - problem.counts[index].sum(axis=0)
    cost = problem.cost
    others_work_s = cost.pair_s * others[1] + cost.token_s * others[0] + cost.sample_s * others[2]
    found = ladder(problem, problem.columns[:, index], least[index])
    return LongSamples(index, found, float(others_work_s))
