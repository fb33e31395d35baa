"""The optimum on tiny inputs, by trying everything; a yardstick for tests, not a policy.

Groups that fit into a node are taken to lie in one, so with several nodes no plan need be as short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import numpy as np

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError
from flexcp.core.layout import make_layout
from flexcp.core.plan import Mode
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Load
from flexcp.planner.allocation import dynamic_programme
from flexcp.planner.exchanges import fastest

MAX_SAMPLES, MAX_RANKS = 5, 4


def optimum_s(
    samples: Sequence[Sample],
    cluster: Cluster,
    cost: CostModel,
    whole_below_tokens: int,
    mode: Mode = "lockstep",
    *,
    any_exchange: bool = False,
) -> float:
    """Least makespan over all packings, degrees, and wave splits or orders; groups inside nodes if they can.

    All groups use the exchange of the cost model, or each the fastest that it may.

    Memory is judged by the layout itself. Infinite if no plan exists. Complexity: exponential.

    Raises:
        ConfigError: more than 5 samples or 4 ranks.
    """
    if len(samples) > MAX_SAMPLES or cluster.ranks > MAX_RANKS:
        raise ConfigError(
            f"{len(samples)} samples on {cluster.ranks} ranks are too many to try everything",
            f"At most {MAX_SAMPLES} samples and {MAX_RANKS} ranks.",
        )

    @cache
    def pack_table(pack: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        load = Load.of_pack((samples[k] for k in pack), whole_below_tokens)
        table = cost.times_s(load, cluster.ranks, cluster.ranks_per_node)
        if any_exchange:
            degrees = np.arange(1, cluster.ranks + 1)
            columns = np.tile(np.array(load.counts, dtype=np.float64)[:, None], cluster.ranks)
            table, _ = fastest(cost, cluster, columns, degrees, degrees > cluster.ranks_per_node)
        for degree in range(1, cluster.ranks + 1):
            layout = make_layout(tuple(samples[k] for k in pack), degree, whole_below_tokens)
            if layout.max_rows > cluster.tokens_per_rank:
                table[degree - 1] = np.inf
        return table

    @cache
    def wave_s(members: tuple[int, ...]) -> float:
        return min(_makespan_s([pack_table(pack) for pack in packs]) for packs in _partitions(members))

    if mode == "free-running":
        packings = _partitions(tuple(range(len(samples))))
        return min(
            _queue_s([pack_table(pack) for pack in packs], (0.0,) * cluster.ranks, np.inf)
            for packs in packings
        )
    return min(sum(wave_s(wave) for wave in waves) for waves in _partitions(tuple(range(len(samples)))))


def _queue_s(
    tables: list[np.ndarray[tuple[int], np.dtype[np.float64]]], free_s: tuple[float, ...], best_s: float
) -> float:
    """Least end over all orders of packs, degrees and choices of ranks; `free_s` ascends.

    Some optimal schedule starts every pack as early as its ranks allow, in order of starts.
    """
    if not tables:
        return max(free_s)
    for number, table in enumerate(tables):
        others = tables[:number] + tables[number + 1 :]
        for degree in range(1, len(free_s) + 1):
            for ranks in combinations(range(len(free_s)), degree):
                end_s = free_s[ranks[-1]] + float(table[degree - 1])
                if max(end_s, free_s[-1]) < best_s:
                    kept = [s for rank, s in enumerate(free_s) if rank not in ranks]
                    best_s = min(best_s, _queue_s(others, tuple(sorted([*kept, *[end_s] * degree])), best_s))
    return best_s


def _makespan_s(tables: list[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> float:
    """Least makespan of the packs of one wave; infinite if they do not fit side by side."""
    table_s = np.array(tables)
    least = np.where(np.isfinite(table_s).any(axis=1), np.isfinite(table_s).argmax(axis=1) + 1, np.inf)
    if least.sum() > table_s.shape[1]:
        return float("inf")
    degrees = np.array(dynamic_programme(table_s))
    return float(table_s[np.arange(len(degrees)), degrees - 1].max())


def _partitions(items: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """All ways to split items into non-empty blocks."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for blocks in _partitions(rest):
        yield [(first,), *blocks]
        for index, block in enumerate(blocks):
            yield [*blocks[:index], (first, *block), *blocks[index + 1 :]]
