"""What every drawing of ranks and times must decide: which ranks are shown, and which values are marked."""

from __future__ import annotations

import math
from collections.abc import Iterator


def shown_ranks(ranks: int, most: int) -> tuple[int, ...]:
    """Every k-th rank, from 0.

    >>> shown_ranks(4, most=4), shown_ranks(9, most=4)
    ((0, 1, 2, 3), (0, 3, 6))
    """
    return tuple(range(0, ranks, -(-ranks // most)))


def round_steps(low: float, high: float, count: int) -> list[float]:
    """About `count` round values that cover low to high.

    >>> round_steps(0.0, 7.3, 4)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    rough = (high - low) / count or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def label_distance(ranks_per_node: int, row: float, room: float = 13.0) -> int:
    """Ranks from one label to the next, so that each has room and the first rank of every node is labelled.

    Args:
        ranks_per_node: ranks that share a node.
        row: height of one rank.
        room: height of a label.

    >>> [label_distance(8, row) for row in (20.0, 5.0, 1.0)]
    [1, 4, 16]
    """
    return next(distance for distance in _distances(ranks_per_node) if distance * row >= room)


def _distances(ranks_per_node: int) -> Iterator[int]:
    """Parts of a node, then whole nodes."""
    yield from (k for k in range(1, ranks_per_node) if ranks_per_node % k == 0)
    yield from (ranks_per_node * 2**k for k in range(40))
