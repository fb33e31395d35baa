"""Free-running schedules: long samples as rings, everything else where time is left.

Only for the mode in which a task waits for nothing but its own ranks. Every rank then has a queue, so
memory limits the single pack and no longer the wave.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from flexcp.planner.degrees import LongSamples
from flexcp.planner.problem import Assignment, Pack, Problem

# A sample that cannot meet its limit takes the least degree within this factor of its best time.
_NEAR_BEST = 1.05


@dataclass(slots=True)
class Gap:
    """Idle time of one rank: before one of its rings, or (`last`) after all of them.

    Seconds here are those of a rank at speed 1; `left_s` of a last gap is measured from the bound and may
    become negative.
    """

    rank: int
    left_s: float
    speed: float
    packs: list[list[int]] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Ring:
    """One long sample on its ranks, and the idle time that it leaves before it starts."""

    sample: int
    ranks: tuple[int, ...]
    gaps: list[Gap]


@dataclass(slots=True)
class ListSchedule:
    """A free-running step: rings in the one order that all ranks keep, and the queue of every rank."""

    rings: list[Ring]
    ends: list[Gap]
    step_s: float


def list_schedule(
    problem: Problem, samples: LongSamples, bound_s: float, share: float, block: int
) -> ListSchedule:
    """Plan a free-running step in which no long sample runs longer than `share` of the bound, if it can.

    1. Each sample takes its least degree that meets the limit; those on several ranks become rings. Widest
       first, a ring goes to the node where it can start first, on its ranks that are free first.
    2. The others go longest first: into the largest idle time before a ring that holds them, else to the
       rank with most time left, as packs of up to E tokens.

    Complexity: O(rings · log N + wide rings · nodes + degrees · nodes + K log (K + N)).
    """
    top_speed = problem.cluster.top_speed
    limit_s = np.maximum(share * bound_s * top_speed, _NEAR_BEST * samples.best_s)
    degrees = samples.ladder.degrees(limit_s)
    wide = np.flatnonzero(degrees > 1)
    seconds = samples.ladder.times_s(degrees[wide], wide)
    order = np.lexsort((wide, -seconds, -degrees[wide]))
    wide, seconds = wide[order], seconds[order]
    crossing_s = problem.cost.seconds(samples.ladder.columns[:, wide], degrees[wide], True)
    nodes = _Blocks(problem, block)
    lists = samples.index[wide].tolist(), degrees[wide].tolist(), seconds.tolist(), crossing_s.tolist()
    rings = [nodes.place(*ring) for ring in zip(*lists, strict=True)]
    ends = nodes.ends(bound_s)
    single = np.ones(problem.size, dtype=bool)
    single[samples.index[wide]] = False
    singles = np.flatnonzero(single)
    singles = singles[np.argsort(-problem.work_s[singles], kind="stable")]
    _fill(problem, [gap for ring in rings for gap in ring.gaps], ends, singles.tolist())
    step_s = max(bound_s - end.left_s / end.speed for end in ends)
    return ListSchedule(rings, ends, step_s)


class _Blocks:
    """When every rank is free, by node; ranks of a node are alike to a ring, so only their times count."""

    def __init__(self, problem: Problem, block: int) -> None:
        cluster = problem.cluster
        self._cluster = cluster
        self._block = per_node = min(block, cluster.ranks)
        starts = range(0, cluster.ranks, per_node)
        self._free = [
            [(0.0, -rank) for rank in reversed(range(start, min(start + per_node, cluster.ranks)))]
            for start in starts
        ]
        self._degree = 0
        self._heap: list[tuple[float, float, int]] = []

    def place(self, sample: int, degree: int, seconds: float, crossing_s: float) -> Ring:
        """Where the ring can start first, and then idles least; never wider after narrower."""
        per_node = self._block
        parts = self._across(degree) if degree > per_node else [(self._inside(degree), degree)]
        start_s = max(self._free[node][count - 1][0] for node, count in parts)
        taken = [entry for node, count in parts for entry in self._take(node, count, start_s)]
        ranks = tuple(sorted([-name for _, name in taken]))
        if self._cluster.node_of(ranks[0]) != self._cluster.node_of(ranks[-1]):
            seconds = crossing_s
        end_s = start_s + seconds / self._cluster.speed(ranks)
        for rank in ranks:
            insort(self._free[rank // per_node], (end_s, -rank))
        if len(parts) == 1:
            heapq.heapreplace(self._heap, self._key(parts[0][0], degree))
        gaps = [self._gap(start_s - free_s, -name) for free_s, name in taken if free_s < start_s]
        return Ring(sample, ranks, gaps)

    def _take(self, node: int, count: int, start_s: float) -> list[tuple[float, int]]:
        """Remove the ranks that are free by the start, the last of them: the others keep their room."""
        free = self._free[node]
        upto = bisect_right(free, (start_s, 1))
        taken = free[upto - count : upto]
        del free[upto - count : upto]
        return taken

    def _key(self, node: int, degree: int) -> tuple[float, float, int]:
        """Start of a ring in a node, idle time before it, node."""
        free = self._free[node]
        start_s = free[degree - 1][0]
        upto = bisect_right(free, (start_s, 1))
        return start_s, degree * start_s - sum([entry[0] for entry in free[upto - degree : upto]]), node

    def _gap(self, idle_s: float, rank: int) -> Gap:
        speed = self._cluster.speed((rank,))
        return Gap(rank, idle_s * speed, speed)

    def _inside(self, degree: int) -> int:
        if degree != self._degree:
            self._degree = degree
            self._heap = [self._key(n, degree) for n, free in enumerate(self._free) if len(free) >= degree]
            heapq.heapify(self._heap)
        return self._heap[0][2]

    def _across(self, degree: int) -> list[tuple[int, int]]:
        """Whole nodes, then the rest of the ring in one more: the fewest links between nodes."""
        free, per_node = self._free, self._block
        count, rest = divmod(degree, per_node)
        full = sorted((entries[-1][0], node) for node, entries in enumerate(free) if len(entries) == per_node)
        start_s = full[count - 1][0]
        if rest:
            spare = [node for _, node in full[count:]]
            spare += [node for node in range(len(free)) if rest <= len(free[node]) < per_node]
            start_s = max(start_s, min(free[node][rest - 1][0] for node in spare))
        upto = bisect_right(full, (start_s, len(free)))
        whole = [node for _, node in full[max(0, upto - count) : upto]]
        parts = [(node, per_node) for node in whole]
        if rest:
            others = [n for n in range(len(free)) if n not in whole and len(free[n]) >= rest]
            able = [node for node in others if free[node][rest - 1][0] <= start_s]
            parts.append((min(able or others, key=lambda node: self._idle_key(node, rest, start_s)), rest))
        return parts

    def _idle_key(self, node: int, count: int, start_s: float) -> tuple[float, int, int]:
        """Idle time that a ring leaves in a node, or how late the node is; then the fuller node."""
        free = self._free[node]
        upto = max(count, bisect_right(free, (start_s, 1)))
        idle_s = sum([abs(start_s - entry[0]) for entry in free[upto - count : upto]])
        return idle_s, upto, node

    def ends(self, bound_s: float) -> list[Gap]:
        """Time left on every rank until the bound, ranks ascending."""
        free = sorted((-name, free_s) for node in self._free for free_s, name in node)
        return [self._gap(bound_s - free_s, rank) for rank, free_s in free]


def _fill(problem: Problem, gaps: list[Gap], ends: list[Gap], samples: list[int]) -> None:
    """Samples, longest first; no gap before a ring is overfilled, ends of ranks can always take more."""
    work_s, rows, pack_s = problem.work_s.tolist(), problem.rows, problem.cost.pack_s
    capacity = problem.cluster.tokens_per_rank
    slots = gaps + ends
    before = [(-gap.left_s, index) for index, gap in enumerate(gaps)]
    after = [(-end.left_s / end.speed, index) for index, end in enumerate(ends, len(gaps))]
    heapq.heapify(before)
    heapq.heapify(after)
    for sample in samples:
        tokens, seconds = rows[sample][0], work_s[sample]
        heap = before if before and -before[0][0] >= seconds + pack_s else after
        index = heap[0][1]
        slot = slots[index]
        for number, room in enumerate(slot.rooms):
            if room >= tokens:
                slot.packs[number].append(sample)
                slot.rooms[number] = room - tokens
                break
        else:
            slot.packs.append([sample])
            slot.rooms.append(capacity - tokens)
            seconds += pack_s
        slot.left_s -= seconds
        heapq.heapreplace(heap, (-slot.left_s / slot.speed, index))


def in_waves(problem: Problem, made: ListSchedule) -> Assignment:
    """Number tasks so that waves ascend along every rank; waves number the longest chain before a task.

    Ranks meet in rings only, and rings were placed in one order on all ranks, so the order is consistent.
    """
    packs: list[list[int]] = []
    groups: list[tuple[int, ...]] = []
    numbers: list[int] = []
    level = [0] * problem.ranks

    def add(samples: list[int], ranks: tuple[int, ...]) -> None:
        wave = level[ranks[0]] if len(ranks) == 1 else max([level[rank] for rank in ranks])
        packs.append(samples)
        groups.append(ranks)
        numbers.append(wave)
        for rank in ranks:
            level[rank] = wave + 1

    for ring in made.rings:
        for gap in ring.gaps:
            for samples in gap.packs:
                add(samples, (gap.rank,))
        add([ring.sample], ring.ranks)
    for gap in made.ends:
        for samples in gap.packs:
            add(samples, (gap.rank,))
    waves: list[list[Pack]] = [[] for _ in range(max(level))]
    for wave, pack in zip(numbers, problem.packs(packs, groups), strict=True):
        waves[wave].append(pack)
    return tuple(tuple(wave) for wave in waves)
