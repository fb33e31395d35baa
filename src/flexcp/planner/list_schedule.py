"""Free-running schedules: long samples as rings on rank windows, everything else where time is left.

Only for the mode in which a task waits for nothing but its own ranks. Every rank then has a queue, so
memory limits the single pack and no longer the wave.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from flexcp.planner.allocation import least_degrees
from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.problem import Assignment, Pack, Problem

# A sample that cannot meet its limit takes the least degree within this factor of its best time.
_NEAR_BEST = 1.05


@dataclass(slots=True)
class _Gap:
    """Idle time of one rank: before one of its rings, or (`last`) after all of them."""

    rank: int
    left_s: float
    last: bool
    packs: list[list[int]] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Ring:
    sample: int
    ranks: range
    gaps: list[_Gap]


def list_schedule(problem: Problem, share: float) -> Assignment:
    """Plan a free-running step in which no long sample runs longer than `share` of the bound, if it can.

    1. Each sample takes its least degree that meets the limit; those on several ranks become rings. Widest
       first, a ring goes to the window of neighbouring ranks, inside a node where it fits, that is free
       first and wastes least.
    2. The others go longest first into the largest idle time, before a ring or at the end of a rank, as
       packs of up to E tokens.
    3. Ranks meet in rings only, and all rings are in one order; waves number the longest chain before a task.

    Complexity: O(rings · N + K log(K + N)).
    """
    bound_s = lower_bound_s(problem)
    limit_s = share * bound_s
    table_s = problem.sample_table_s
    degrees = least_degrees(table_s, np.maximum(limit_s, _NEAR_BEST * table_s.min(axis=1))[:, None])
    seconds = table_s[np.arange(len(degrees)), degrees - 1]
    free_s = np.zeros(problem.ranks)
    rings = _place_rings(problem, degrees.tolist(), seconds.tolist(), free_s)
    ends = [_Gap(rank, bound_s - float(free_s[rank]), True) for rank in range(problem.ranks)]
    singles = [k for k in range(len(degrees)) if degrees[k] == 1]
    singles.sort(key=lambda k: (-problem.work_s[k], k))
    _fill_gaps(problem, [gap for ring in rings for gap in ring.gaps] + ends, singles)
    return _in_waves(problem, rings, ends)


def _place_rings(
    problem: Problem, degrees: list[int], seconds: list[float], free_s: np.ndarray
) -> list[_Ring]:
    """Give each ring a window; `free_s`, when each rank is free, moves on in place."""
    rings = []
    wide = [k for k, degree in enumerate(degrees) if degree > 1]
    for k in sorted(wide, key=lambda k: (-degrees[k], -seconds[k], k)):
        first, start_s = _best_window(problem, degrees[k], free_s)
        ranks = range(first, first + degrees[k])
        idle_s = start_s - free_s[ranks.start : ranks.stop]
        gaps = [_Gap(rank, float(idle), False) for rank, idle in zip(ranks, idle_s, strict=True) if idle > 0]
        rings.append(_Ring(k, ranks, gaps))
        free_s[ranks.start : ranks.stop] = start_s + seconds[k]
    return rings


def _best_window(problem: Problem, degree: int, free_s: np.ndarray) -> tuple[int, float]:
    """First rank and start of the window that is free earliest, then idles least, then comes first."""
    windows = np.lib.stride_tricks.sliding_window_view(free_s, degree)
    starts_s = windows.max(axis=1)
    idle_s = starts_s * degree - windows.sum(axis=1)
    firsts = np.arange(len(windows))
    per_node = problem.cluster.ranks_per_node
    inside = firsts[firsts // per_node == (firsts + degree - 1) // per_node]
    candidates = inside if len(inside) else firsts
    best = candidates[np.lexsort((candidates, idle_s[candidates], starts_s[candidates]))[0]]
    return int(best), float(starts_s[best])


def _fill_gaps(problem: Problem, gaps: list[_Gap], samples: list[int]) -> None:
    """Longest first into the largest gap that can take it; the ends of ranks can always."""
    heap = [(-gap.left_s, index) for index, gap in enumerate(gaps)]
    heapq.heapify(heap)
    capacity, pack_s = problem.cluster.tokens_per_rank, problem.cost.pack_s
    for k in samples:
        tokens, passed = problem.loads[k].tokens, []
        while True:
            entry = heapq.heappop(heap)
            gap = gaps[entry[1]]
            pack = next((p for p, room in enumerate(gap.rooms) if room >= tokens), None)
            needed_s = float(problem.work_s[k]) + (pack_s if pack is None else 0.0)
            if gap.last or gap.left_s >= needed_s:
                break
            passed.append(entry)
        if pack is None:
            pack = len(gap.packs)
            gap.packs.append([])
            gap.rooms.append(capacity)
        gap.packs[pack].append(k)
        gap.rooms[pack] -= tokens
        gap.left_s -= needed_s
        for other in passed:
            heapq.heappush(heap, other)
        heapq.heappush(heap, (-gap.left_s, entry[1]))


def _in_waves(problem: Problem, rings: list[_Ring], ends: list[_Gap]) -> Assignment:
    """Number tasks so that waves ascend along every rank; rings were placed in their order on every rank."""
    waves: list[list[Pack]] = []
    level = [0] * problem.ranks

    def add(samples: list[int], ranks: range) -> None:
        wave = max(level[rank] for rank in ranks)
        while len(waves) <= wave:
            waves.append([])
        pack = problem.pack(samples, len(ranks))
        waves[wave].append(Pack(pack.samples, pack.load, pack.degree, tuple(ranks)))
        for rank in ranks:
            level[rank] = wave + 1

    def add_gap(gap: _Gap) -> None:
        for samples in gap.packs:
            add(samples, range(gap.rank, gap.rank + 1))

    for ring in rings:
        for gap in ring.gaps:
            add_gap(gap)
        add([ring.sample], ring.ranks)
    for gap in ends:
        add_gap(gap)
    return tuple(tuple(wave) for wave in waves)
