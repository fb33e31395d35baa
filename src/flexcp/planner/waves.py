"""Lockstep steps: how many waves, how long each, which samples in which; by time, within memory.

A wave costs its longest pack. So a wave that holds a long sample is filled up to that sample's time first,
and only what does not fit there makes the other waves longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from flexcp.planner.allocation import threshold
from flexcp.planner.balance import room_tokens
from flexcp.planner.bounds import forced_lengths_s, lower_bound_s
from flexcp.planner.degrees import LongSamples, long_samples
from flexcp.planner.problem import Array, Assignment, Pack, Problem, Wave

# Wave counts looked at from the first that works, shapes looked at closely, and shapes made exact.
_WAVE_COUNTS = 8
_CLOSE_LOOKS = 2
_EXACT = 3
# Targets tried, relative to the one at which rank-time is used up exactly.
_FACTORS = (0.94, 0.97, 1.03, 1.08, 1.15)
_SLACKS = (1.15, 1.0, 1.05, 1.3, 1.5)
_BISECTIONS = 16
_SWEEPS = 6
_SWEEP_SLACKS = (1.02, 1.06, 1.15)


class _Shape(NamedTuple):
    """What is searched: waves, target relative to the balanced one, slack for samples that miss it.

    A sample that cannot meet the target takes the least degree within `slack` of its best time. More slack
    spends fewer ranks on long samples and makes their wave longer.
    """

    num_waves: int
    factor: float = 1.0
    slack: float = _SLACKS[0]


@dataclass(slots=True)
class _Slot:
    """A pack in the making: its wave, degree, seconds, room in tokens and samples."""

    wave: int
    degree: int
    filled_s: float
    room: int
    samples: list[int] = field(default_factory=list)


def search(problem: Problem) -> list[Assignment]:
    """The best few assignments, degrees inside each wave made optimal; the best one first is not promised.

    Wave counts first, then slacks, then targets, each time around the few best shapes so far. Shapes are
    compared by their makespan before degrees are made exact and groups are placed.

    Complexity: O(shapes · K log K), and a threshold search for each wave of the best shapes.
    """
    lengths_s = lower_bound_s(problem)
    first = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    samples = long_samples(problem, 0.5 * lengths_s / (first + _WAVE_COUNTS))
    forced_s = forced_lengths_s(problem, samples)
    made: dict[_Shape, tuple[float, list[_Slot]]] = {}

    def look(shapes: Iterable[_Shape]) -> list[_Shape]:
        for shape in shapes:
            if shape not in made and (slots := _attempt(problem, samples, forced_s, shape)):
                made[shape] = _makespan_s(slots), slots
        return sorted(made, key=lambda shape: (made[shape][0], shape))

    count = max(first, len(forced_s))
    while not look([_Shape(count)]) and count < problem.size:
        count += 1 + count // 16
    last = min(count + _WAVE_COUNTS, problem.size + 1)
    leaders = look(_Shape(waves) for waves in range(count, last))[:_CLOSE_LOOKS]
    leaders = look(shape._replace(slack=slack) for shape in leaders for slack in _SLACKS)[:_CLOSE_LOOKS]
    leaders = look(shape._replace(factor=factor) for shape in leaders for factor in _FACTORS)
    packed = [made[shape][1] for shape in leaders[:_EXACT]]
    swept = [
        slots
        for waves in (count, count + 1)
        for slack in _SWEEP_SLACKS
        if (slots := _densest_first(problem, samples, waves, slack))
    ]
    packed += sorted(swept, key=_makespan_s)[:_EXACT]
    return [_exact(problem, slots) for slots in packed]


def _densest_first(
    problem: Problem, samples: LongSamples, num_waves: int, slack: float
) -> list[_Slot] | None:
    """Slots at the least target that suffices for so many waves, by bisection; see `_sweep`."""
    low = problem.total_work_s / problem.ranks / num_waves / 2
    high = 4 * low + problem.cost.pack_s
    found = None
    for _ in range(_SWEEPS):
        middle = (low + high) / 2
        slots = _sweep(problem, samples, num_waves, middle, slack)
        if slots is None:
            low = middle
        else:
            found, high = slots, middle
    return found


def _sweep(
    problem: Problem, samples: LongSamples, num_waves: int, target_s: float, slack: float
) -> list[_Slot] | None:
    """Fill one wave after the other, longest samples first; None if some are left.

    A wave lasts as long as the longest sample left needs, at least the target. Samples take the least degree
    that meets this time, so long waves hold the densest samples on few ranks; what has no place waits.

    Complexity: O(waves · K).
    """
    rows, work_s = problem.rows, problem.work_s.tolist()
    capacity, pack_s = problem.cluster.tokens_per_rank, problem.cost.pack_s
    near_s = slack * samples.best_s
    left: list[int] = list(range(problem.size))
    place = {sample: row for row, sample in enumerate(samples.index.tolist())}
    made: list[_Slot] = []
    for wave in range(num_waves):
        heads = [place[sample] for sample in left[:8] if sample in place]
        end_s = max([target_s, *near_s[heads].tolist()])
        degrees = samples.ladder.degrees(np.maximum(end_s, samples.best_s))
        times_s = samples.ladder.times_s(degrees).tolist()
        wide = degrees.tolist()
        free, later = problem.ranks, []
        open_slots: list[tuple[float, int]] = []  # least filled first
        for sample in left:
            tokens, row = rows[sample][0], place.get(sample, -1)
            if row >= 0 and wide[row] > 1:
                if wide[row] <= free and times_s[row] <= end_s * (1 + 1e-9):
                    free -= wide[row]
                    room = room_tokens(problem, wide[row]) - tokens
                    made.append(_Slot(wave, wide[row], times_s[row], room, [sample]))
                    heapq.heappush(open_slots, (times_s[row], len(made) - 1))
                else:
                    later.append(sample)
                continue
            seconds = work_s[sample]
            if free and pack_s + seconds <= end_s:
                free -= 1
                made.append(_Slot(wave, 1, pack_s + seconds, capacity - tokens, [sample]))
                heapq.heappush(open_slots, (pack_s + seconds, len(made) - 1))
                continue
            skipped = []
            while open_slots and open_slots[0][0] < end_s:
                slot = made[open_slots[0][1]]
                if slot.room >= tokens and slot.filled_s + seconds / slot.degree <= end_s:
                    break
                skipped.append(heapq.heappop(open_slots))
            if open_slots and open_slots[0][0] < end_s:
                slot = made[open_slots[0][1]]
                slot.samples.append(sample)
                slot.room -= tokens
                slot.filled_s += seconds / slot.degree
                heapq.heapreplace(open_slots, (slot.filled_s, open_slots[0][1]))
            else:
                later.append(sample)
            for entry in skipped:
                heapq.heappush(open_slots, entry)
        left = later
        if not left:
            return made
    return None


def _makespan_s(slots: list[_Slot]) -> float:
    longest: dict[int, float] = {}
    for slot in slots:
        if slot.samples:
            longest[slot.wave] = max(longest.get(slot.wave, 0.0), slot.filled_s)
    return sum(longest.values())


def _attempt(problem: Problem, samples: LongSamples, forced_s: Array, shape: _Shape) -> list[_Slot] | None:
    """Slots of one shape; None if it does not fit into its waves."""
    limits_s = np.maximum(
        shape.factor * _balanced_target_s(problem, samples, forced_s, shape), shape.slack * samples.best_s
    )
    degrees = samples.ladder.degrees(limits_s)
    seconds = samples.ladder.times_s(degrees)
    wide = np.flatnonzero(degrees > 1)
    order = wide[np.lexsort((wide, -degrees[wide], -seconds[wide]))]
    rings = list(
        zip(samples.index[order].tolist(), degrees[order].tolist(), seconds[order].tolist(), strict=True)
    )
    slots = _open(problem, shape.num_waves, rings)
    if slots is None:
        return None
    single = np.ones(problem.size, dtype=bool)
    single[samples.index[wide]] = False
    singles = np.flatnonzero(single)
    left_s = float(problem.work_s[singles].sum())
    ends_s = _ends_s(problem, shape.num_waves, slots, left_s)
    singles = singles[np.argsort(-problem.work_s[singles], kind="stable")]
    return slots if _fill(problem, slots, ends_s, singles.tolist()) else None


def _balanced_target_s(problem: Problem, samples: LongSamples, forced_s: Array, shape: _Shape) -> float:
    """Target at which the samples' rank-time just fills all waves, none shorter than it must be.

    Bisects for Σ over waves of N·(max(target, B_w) - c) = rank-time at the degrees for the target.
    """
    pack_s, ranks = problem.cost.pack_s, problem.ranks
    forced = np.zeros(shape.num_waves)
    # forced[: len(forced_s)] = forced_s[: shape.num_waves]
    work_s = problem.work_s[samples.index]
    best_s = shape.slack * samples.best_s
    low = pack_s
    high = pack_s + 4 * problem.total_work_s / ranks / shape.num_waves + float(best_s.max(initial=0.0))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        degrees = samples.ladder.degrees(np.maximum(middle, best_s))
        wide = degrees > 1
        areas_s = np.where(wide, samples.ladder.times_s(degrees) * degrees, work_s)
        room_s = ranks * float((np.maximum(middle, forced) - pack_s).sum())
        fits = float(np.cumsum(areas_s)[-1]) if len(areas_s) else 0.0
        if fits + samples.others_work_s <= room_s:
            high = middle
        else:
            low = middle
    return high


def _open(problem: Problem, num_waves: int, rings: list[tuple[int, int, float]]) -> list[_Slot] | None:
    """One slot per ring, longest rings in the first waves, and one per rank left; None if they need more."""
    free = [problem.ranks] * num_waves
    slots, first = [], 0
    for sample, degree, seconds in rings:
        while first < num_waves and free[first] == 0:
            first += 1
        wave = next((w for w in range(first, num_waves) if free[w] >= degree), None)
        if wave is None:
            return None
        free[wave] -= degree
        # A lone sample fits in any case, even where the room for mixtures is less.
        room = room_tokens(problem, degree) - problem.rows[sample][0]
        slots.append(_Slot(wave, degree, seconds, room, [sample]))
    capacity, pack_s = problem.cluster.tokens_per_rank, problem.cost.pack_s
    for wave, ranks in enumerate(free):
        slots += [_Slot(wave, 1, pack_s, capacity) for _ in range(ranks)]
    return slots


def _ends_s(problem: Problem, num_waves: int, slots: list[_Slot], left_s: float) -> list[float]:
    """The length that each wave should have.

    Waves of long rings keep their length; the others share a length at which all the rest just fits.
    """
    longest, busy = [0.0] * num_waves, [0.0] * num_waves
    for slot in slots:
        longest[slot.wave] = max(longest[slot.wave], slot.filled_s)
        busy[slot.wave] += slot.filled_s * slot.degree
    need_s = left_s + sum(busy)
    level = 0.0
    ascending = sorted(longest)
    for count in range(1, num_waves + 1):
        # The `count` waves with the shortest rings rise to one level.
        level = need_s / problem.ranks - sum(ascending[count:])
        level /= count
        if count == num_waves or level <= ascending[count]:
            break
    return [max(level, wave_s) for wave_s in longest]


def _fill(problem: Problem, slots: list[_Slot], ends_s: list[float], samples: list[int]) -> bool:
    """Samples, longest first, each into the slot with most time left until the end of its wave, with room.

    Whether all found a slot. Slots without room for the least sample still to come are done.
    """
    work_s, rows = problem.work_s.tolist(), problem.rows
    smallest = list(accumulate((rows[sample][0] for sample in reversed(samples)), min))[::-1]
    heap = [(slot.filled_s - ends_s[slot.wave], index) for index, slot in enumerate(slots)]
    heapq.heapify(heap)
    for sample, least in zip(samples, smallest, strict=True):
        tokens, passed = rows[sample][0], []
        while heap and slots[heap[0][1]].room < tokens:
            entry = heapq.heappop(heap)
            if slots[entry[1]].room >= least:
                passed.append(entry)
        if not heap:
            return False
        late_s, index = heap[0]
        slot = slots[index]
        slot.samples.append(sample)
        slot.room -= tokens
        slot.filled_s += work_s[sample] / slot.degree
        heapq.heapreplace(heap, (late_s + work_s[sample] / slot.degree, index))
        for entry in passed:
            heapq.heappush(heap, entry)
    return True


def _exact(problem: Problem, slots: list[_Slot]) -> Assignment:
    """Waves of packs, with the best degrees in each."""
    waves: dict[int, list[Pack]] = {}
    for slot in slots:
        if slot.samples:
            waves.setdefault(slot.wave, []).append(problem.pack(slot.samples, slot.degree))
    return tuple(_reallocate(problem, waves[wave]) for wave in sorted(waves))


def _reallocate(problem: Problem, wave: list[Pack]) -> Wave:
    degrees = threshold(problem.table_s([pack.load for pack in wave]))
    return tuple(Pack(p.samples, p.load, d) for p, d in zip(wave, degrees, strict=True))
