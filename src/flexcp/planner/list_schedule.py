"""Free-running schedules: long samples as rings, everything else where time is left.

Only for the mode in which a task waits for nothing but its own ranks. Every rank then has a queue, so
memory limits the single pack and no longer the wave.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from flexcp.core.plan import Task
from flexcp.planner.degrees import LongSamples
from flexcp.planner.placement import Group
from flexcp.planner.problem import Integers, Problem
from flexcp.planner.timeline import placed_s, run_in_order

# Slots looked at whose open pack may have room for a sample, before one is taken that can hold another pack.
_LOOKS = 8


class Layout(NamedTuple):
    """How rings are laid out.

    Attributes:
        share: no long sample runs longer than this share of the step, where more ranks can prevent it.
        block: ranks, from 0 on, are taken in blocks of so many; a ring lies in one where it fits.
    """

    share: float
    block: int


@dataclass(slots=True)
class Gap:
    """Idle time of one rank: before one of its rings, or from its last ring to the end of the step.

    Seconds here are those of a rank at speed 1; `left_s` of a gap at the end is measured from the target and
    may become negative. `open` is the pack with most room, `room` the tokens that it can still take.
    """

    rank: int
    left_s: float
    speed: float
    packs: list[list[int]] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    room: int = 0


@dataclass(slots=True)
class Ring:
    """One long sample on its ranks, and the idle time that it leaves before it starts."""

    sample: int
    ranks: Group
    gaps: list[Gap]


@dataclass(slots=True)
class ListSchedule:
    """A free-running step: rings in the one order that all ranks keep, and what is left at the end."""

    rings: list[Ring]
    ends: list[Gap]
    step_s: float


def list_schedule(problem: Problem, samples: LongSamples, target_s: float, layout: Layout) -> ListSchedule:
    """Plan a free-running step of `target_s`; it may come out longer.

    1. Each sample takes its least degree that meets the target's share; those on several ranks become rings.
       Widest first, a ring goes to the block where it can start first, on its ranks that are free last.
    2. The others go longest first, as packs of up to E tokens, where they leave least time before a ring or
       before the target (best fit); those that find no such place, to the rank with most time left.

    Complexity: O(rings · log N + wide rings · blocks + degrees · blocks + K log (K + N)), and moving
    entries of sorted lists of length N.
    """
    limit_s = np.maximum(layout.share * target_s, np.minimum(target_s, samples.near_best_s))
    degrees = samples.ladder.degrees(limit_s)
    wide = np.flatnonzero(degrees > 1)
    seconds = samples.ladder.times_s(degrees[wide], wide)
    order = np.lexsort((wide, -seconds, -degrees[wide]))
    wide, seconds = wide[order], seconds[order]
    crossing_s = problem.cost.seconds(samples.ladder.columns[:, wide], degrees[wide], True)
    blocks = _Blocks(problem, layout.block)
    lists = samples.index[wide].tolist(), degrees[wide].tolist(), seconds.tolist(), crossing_s.tolist()
    rings = [blocks.place(*ring) for ring in zip(*lists, strict=True)]  # widest first, as it asks
    ends = blocks.ends(target_s)
    single = np.ones(problem.size, dtype=bool)
    single[samples.index[wide]] = False
    singles = np.flatnonzero(single)
    singles = singles[np.argsort(-problem.work_s[singles], kind="stable")]
    _fill(problem, [gap for ring in rings for gap in ring.gaps], ends, singles)
    step_s = max([target_s - end.left_s / end.speed for end in ends])
    return ListSchedule(rings, ends, step_s)


class _Blocks:
    """When every rank is free, by block; ranks of a block are alike to a ring, so only their times count.

    Entries are (free since, -rank), ascending. So of ranks that are free equally long the highest comes
    first, and (t, 1) lies behind all that are free by t.
    """

    def __init__(self, problem: Problem, block: int) -> None:
        cluster = problem.cluster
        self._cluster = cluster
        self._block = block = min(block, cluster.ranks)
        starts = range(0, cluster.ranks, block)
        self._free = [
            [(0.0, -rank) for rank in reversed(range(start, min(start + block, cluster.ranks)))]
            for start in starts
        ]
        # The same times as rows, for rings wider than a block; a last, smaller block has endless ones.
        self._table_s = np.full((len(starts), block), np.inf)
        for number, free in enumerate(self._free):
            self._table_s[number, : len(free)] = 0.0
        # Blocks by where rings of one degree can start; made anew for each degree, so wide rings come first.
        self._degree = 0
        self._heap: list[tuple[float, float, int]] = []

    def place(self, sample: int, degree: int, seconds: float, crossing_s: float) -> Ring:
        """Where the ring can start first, and then idles least; call with falling degrees."""
        parts = self._across(degree) if degree > self._block else [(self._inside(degree), degree)]
        start_s = max([self._free[block][count - 1][0] for block, count in parts])
        taken = [entry for block, count in parts for entry in self._take(block, count, start_s)]
        ranks = tuple(sorted([-minus_rank for _, minus_rank in taken]))
        if self._cluster.node_of(ranks[0]) != self._cluster.node_of(ranks[-1]):
            seconds = crossing_s
        end_s = start_s + seconds / self._cluster.speed(ranks)
        for rank in ranks:
            insort(self._free[rank // self._block], (end_s, -rank))
        if degree > self._block:
            for block, _ in parts:
                free = self._free[block]
                self._table_s[block, : len(free)] = [free_s for free_s, _ in free]
        else:
            heapq.heapreplace(self._heap, self._key(parts[0][0], degree))
        gaps = [self._gap(start_s - free_s, -minus_rank) for free_s, minus_rank in taken if free_s < start_s]
        return Ring(sample, ranks, gaps)

    def _take(self, block: int, count: int, start_s: float) -> list[tuple[float, int]]:
        """Remove the ranks that are free by the start, the last of them: the others keep their room."""
        free = self._free[block]
        upto = bisect_right(free, (start_s, 1))
        taken = free[upto - count : upto]
        del free[upto - count : upto]
        return taken

    def _key(self, block: int, degree: int) -> tuple[float, float, int]:
        """Start of a ring in a block, idle time before it, block."""
        free = self._free[block]
        start_s = free[degree - 1][0]
        upto = bisect_right(free, (start_s, 1))
        return start_s, degree * start_s - sum([entry[0] for entry in free[upto - degree : upto]]), block

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
        """Whole blocks, then the rest of the ring in one more: the fewest links between nodes.

        The whole blocks are the last of those that are free by the start; the rest goes where it leaves least
        idle time, or where a block is free first.
        """
        table_s = self._table_s
        count, rest = divmod(degree, self._block)
        full_s = table_s[:, -1]
        order = np.argsort(full_s, kind="stable")
        start_s = float(full_s[order[count - 1]])
        if rest:
            spare = np.ones(len(table_s), dtype=bool)
            spare[order[:count]] = False
            start_s = max(start_s, float(table_s[spare, rest - 1].min()))
        upto = int(np.searchsorted(full_s[order], start_s, side="right"))
        whole = order[max(0, upto - count) : max(count, upto)]
        parts = [(block, self._block) for block in whole.tolist()]
        if rest:
            parts.append((self._rest(whole, rest, start_s), rest))
        return parts

    def _rest(self, whole: Integers, count: int, start_s: float) -> int:
        """The block for a part of a ring: least idle before the start, else least late; then the fuller."""
        table_s = self._table_s
        others = np.ones(len(table_s), dtype=bool)
        others[whole] = False
        able = np.flatnonzero(others & (table_s[:, count - 1] <= start_s))
        if not len(able):
            return int(np.argmin(np.where(others, table_s[:, count - 1], np.inf)))
        upto = (table_s[able] <= start_s).sum(axis=1)
        columns = upto[:, None] - np.arange(1, count + 1)
        idle_s = (start_s - np.take_along_axis(table_s[able], columns, axis=1)).sum(axis=1)
        return int(able[np.lexsort((able, upto, idle_s))[0]])

    def ends(self, target_s: float) -> list[Gap]:
        """Time left on every rank until the target, ranks ascending."""
        free = sorted([(-minus_rank, free_s) for block in self._free for free_s, minus_rank in block])
        return [self._gap(target_s - free_s, rank) for rank, free_s in free]


def _fill(problem: Problem, gaps: list[Gap], ends: list[Gap], samples: Integers) -> None:
    """Samples, longest first; no gap before a ring is overfilled, ends of ranks can always take more."""
    # Entries are (-seconds left, slot), ascending: the emptiest first, so that the slots in use, which are
    # fuller than most, are taken out and put back near the end of a list.
    capacity, pack_s = problem.cluster.tokens_per_rank, problem.cost.pack_s
    before = sorted([(-gap.left_s, index) for index, gap in enumerate(gaps)])
    after = sorted([(-end.left_s, index) for index, end in enumerate(ends)])
    columns = samples.tolist(), problem.counts[samples, 0].tolist(), problem.work_s[samples].tolist()
    for sample, tokens, seconds in zip(*columns, strict=True):
        slots, entries, at = gaps, before, -1
        if before and -before[0][0] >= seconds:
            at = _best_fit(before, gaps, tokens, seconds, pack_s)
        if at < 0:
            slots, entries = ends, after
            at = _best_fit(after, ends, tokens, seconds, pack_s) if -after[0][0] >= seconds else 0
        minus_s, index = entries.pop(max(at, 0))
        slot = slots[index]
        if slot.room >= tokens:
            slot.open.append(sample)
            slot.room -= tokens
        else:
            seconds += pack_s
            pack = [sample]
            slot.packs.append(pack)
            if capacity - tokens >= slot.room:
                slot.open, slot.room = pack, capacity - tokens
        slot.left_s = -minus_s - seconds
        insort(entries, (-slot.left_s, index))


def _best_fit(
    entries: list[tuple[float, int]], slots: list[Gap], tokens: int, seconds: float, pack_s: float
) -> int:
    """Where in the entries the least time left suffices, -1 if none does.

    A slot whose open pack has no room for the sample must hold one more pack; a few that may are looked at.
    """
    at = bisect_right(entries, (-seconds, len(slots))) - 1
    with_pack_s = seconds + pack_s
    for near in range(at, max(-1, at - _LOOKS), -1):
        minus_s, index = entries[near]
        if -minus_s >= with_pack_s or slots[index].room >= tokens:
            return near
    return bisect_right(entries, (-with_pack_s, len(slots)), 0, at + 1) - 1


def scheduled_tasks(problem: Problem, made: ListSchedule) -> tuple[Task, ...]:
    """Tasks in an order that every rank follows; waves ascend along every rank.

    A wave numbers the longest chain before a task. Ranks meet in rings only, and rings were placed in one
    order on all ranks, so the order is consistent.
    """
    packs: list[list[int]] = []
    groups: list[Group] = []
    waves: list[int] = []
    level = [0] * problem.ranks

    def add_singles(gap: Gap) -> None:
        count, rank = len(gap.packs), gap.rank
        packs.extend(gap.packs)
        groups.extend([(rank,)] * count)
        waves.extend(range(level[rank], level[rank] + count))
        level[rank] += count

    for ring in made.rings:
        for gap in ring.gaps:
            add_singles(gap)
        wave = max([level[rank] for rank in ring.ranks])
        packs.append([ring.sample])
        groups.append(ring.ranks)
        waves.append(wave)
        for rank in ring.ranks:
            level[rank] = wave + 1
    for gap in made.ends:
        add_singles(gap)
    seconds = placed_s(problem, packs, groups)
    return run_in_order(problem, sorted(zip(waves, groups, packs, seconds, strict=True)))
