"""Lockstep steps: how many waves, how long each, which samples in which; by time, within memory.

A wave costs its longest pack. So a wave that holds a long sample is filled up to that sample's time first,
and only what does not fit there makes the other waves longer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from flexcp.planner.allocation import threshold
from flexcp.planner.balance import room_tokens
from flexcp.planner.bounds import forced_lengths_s, lower_bound_s
from flexcp.planner.degrees import LongSamples, long_samples
from flexcp.planner.problem import Assignment, Pack, Problem, Wave

# Wave counts tried from the first that works; slacks and targets tried for each; results made exact.
_WAVE_COUNTS = 3
_SLACKS = (1.03, 1.06, 1.15)
_TARGETS = 9
_EXACT = 3
# A count and slack are given up after so many targets if they are this far from the best so far.
_FIRST_TARGETS, _HOPELESS = 4, 1.03
# Longest samples that set the length of a wave, and packs looked at for a sample from either side.
_HEADS, _LOOKS = 8, 8
_ROUNDING = 1 + 1e-9


@dataclass(slots=True)
class _Slot:
    """A pack in the making: its wave, degree, seconds, room in tokens and samples."""

    wave: int
    degree: int
    filled_s: float
    room: int
    samples: list[int] = field(default_factory=list)


def search(problem: Problem, goal_s: float) -> list[Assignment]:
    """The best few assignments, degrees inside each wave made optimal; the best one first is not promised.

    For a few numbers of waves and slacks the least target is sought at which all samples find a place. The
    results are compared by their makespan before degrees are made exact and groups are placed.

    Complexity: O(numbers · slacks · targets · waves · K log K), and a threshold search for each wave of the
    best.
    """
    first = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    above_s = 0.5 * lower_bound_s(problem) / (first + _HEADS)
    samples = long_samples(problem, above_s)
    filler = _Filler(problem, samples)
    count, counts = max(first, len(forced_lengths_s(problem, samples))), 0
    made: list[tuple[float, int, list[_Slot]]] = []
    while counts < _WAVE_COUNTS and (count <= problem.size or not made):
        before = len(made)
        for slack in _SLACKS:
            best_s = min(made)[0] if made else np.inf
            if best_s > goal_s and (found := _lowest(filler, count, slack, above_s, best_s)):
                made.append((found[0], len(made), found[1]))
        counts += len(made) > before or counts > 0
        count += 1 if made else 1 + count // 16
    return [_exact(problem, slots) for _, _, slots in sorted(made)[:_EXACT]]


def _lowest(
    filler: _Filler, num_waves: int, slack: float, above_s: float, best_s: float
) -> tuple[float, list[_Slot]] | None:
    """Least makespan, and its slots, by bisecting for the least target that suffices for so many waves."""
    average_s = filler.problem.total_work_s / filler.problem.ranks / num_waves
    low, high = 0.4 * average_s, 1.6 * average_s + filler.problem.cost.pack_s
    target_s = max(2 * average_s, above_s) + filler.problem.cost.pack_s
    found: tuple[float, list[_Slot]] | None = None
    for number in range(_TARGETS):
        slots = filler.fill(num_waves, target_s, slack)
        if slots:
            high = min(high, target_s)
            makespan_s = _makespan_s(slots)
            if found is None or makespan_s < found[0]:
                found = makespan_s, slots
        elif number == 0:
            return None
        else:
            low = target_s
        if number == _FIRST_TARGETS and found and found[0] > _HOPELESS * best_s:
            break
        target_s = (low + high) / 2
    return found


class _Filler:
    """Fills one wave after the other: samples by falling work, each where it leaves least room in time."""

    def __init__(self, problem: Problem, samples: LongSamples) -> None:
        self.problem = problem
        self._samples = samples
        self._tokens: list[int] = problem.counts[:, 0].tolist()
        self._work_s: list[float] = problem.work_s.tolist()
        self._pair_s: list[float] = (problem.cost.pair_s * problem.counts[:, 1]).tolist()
        self._cut_tokens: list[int] = problem.counts[:, 3].tolist()
        self._order: list[int] = np.argsort(-problem.work_s, kind="stable").tolist()
        self._row = {sample: row for row, sample in enumerate(samples.index.tolist())}

    def fill(self, num_waves: int, target_s: float, slack: float) -> list[_Slot] | None:
        """Slots of all waves; None if some samples are left.

        A wave lasts as long as the longest sample left needs, at least the target. A sample that cannot meet
        the target takes the least degree within `slack` of its best time: more slack spends fewer ranks on
        it and makes its wave longer. The others take the least degree that meets the wave, so long waves
        hold the densest samples on few ranks; what has no place waits.
        """
        left, made = self._order, list[_Slot]()
        near_s = slack * self._samples.best_s
        for wave in range(num_waves):
            heads = [self._row[sample] for sample in left[:_HEADS] if sample in self._row]
            end_s = max([target_s, *near_s[heads].tolist()])
            left = self._wave(wave, end_s, left, made)
            if not left:
                return made
        return None

    def _wave(self, wave: int, end_s: float, left: list[int], made: list[_Slot]) -> list[int]:
        """Add the slots of one wave; returns the samples that wait."""
        ladder = self._samples.ladder
        degrees = ladder.degrees(np.maximum(end_s, self._samples.best_s))
        wide, times_s = degrees.tolist(), ladder.times_s(degrees).tolist()
        pack_s, capacity = self.problem.cost.pack_s, self.problem.cluster.tokens_per_rank
        least_s, least = self._work_s[left[-1]], min([self._tokens[sample] for sample in left])
        free, later = self.problem.ranks, list[int]()
        entries: list[tuple[float, int]] = []  # rank-seconds left in a slot, ascending
        for position, sample in enumerate(left):
            if not free and not entries:
                return later + left[position:]
            tokens, seconds, row = self._tokens[sample], self._work_s[sample], self._row.get(sample, -1)
            degree = wide[row] if row >= 0 else 1
            at = self._best_fit(entries, made, sample) if degree == 1 else -1
            if at >= 0:
                area_s, index = entries.pop(at)
                slot = made[index]
                slot.samples.append(sample)
                slot.room -= tokens
                used_s = self._area_s(sample, slot.degree)
                slot.filled_s += used_s / slot.degree
                area_s -= used_s
            else:
                time_s = times_s[row] if degree > 1 else pack_s + seconds
                if degree > free or time_s > end_s * _ROUNDING:
                    later.append(sample)
                    continue
                free -= degree
                room = room_tokens(self.problem, degree) if degree > 1 else capacity
                slot, index = _Slot(wave, degree, time_s, room - tokens, [sample]), len(made)
                area_s = (end_s - time_s) * degree
                made.append(slot)
            if area_s >= least_s and slot.room >= least:
                insort(entries, (area_s, index))
        return later

    def _best_fit(self, entries: list[tuple[float, int]], slots: list[_Slot], sample: int) -> int:
        """Where in ascending entries the least time left suffices and memory too, -1 if nowhere.

        Where the first few have no room in memory, those with most time left are looked at.
        """
        tokens = self._tokens[sample]
        at, end = bisect_left(entries, (self._work_s[sample],)), len(entries)
        for looks in (range(at, min(at + _LOOKS, end)), range(end - 1, max(at, end - _LOOKS) - 1, -1)):
            for near in looks:
                area_s, index = entries[near]
                slot = slots[index]
                if slot.room >= tokens and self._area_s(sample, slot.degree) <= area_s:
                    return near
        return -1

    def _area_s(self, sample: int, degree: int) -> float:
        """Rank-seconds that a sample adds to a pack at most: its computation, or its traffic if longer."""
        work_s = self._work_s[sample]
        if degree == 1 or not self._cut_tokens[sample]:
            return work_s
        cost = self.problem.cost
        link = cost.inter if degree > self.problem.cluster.ranks_per_node else cost.intra
        traffic_s = (degree - 1) * cost.kv_bytes_per_token * self._cut_tokens[sample] / link.bytes_per_s
        hidden_s = self._pair_s[sample]
        return work_s + max(0.0, traffic_s - hidden_s) + (degree - 1) * cost.sample_s


def _makespan_s(slots: list[_Slot]) -> float:
    longest: dict[int, float] = {}
    for slot in slots:
        longest[slot.wave] = max(longest.get(slot.wave, 0.0), slot.filled_s)
    return sum(longest.values())


def _exact(problem: Problem, slots: list[_Slot]) -> Assignment:
    """Waves of packs, with the best degrees in each."""
    waves: dict[int, list[Pack]] = {}
    for slot in slots:
        waves.setdefault(slot.wave, []).append(problem.pack(slot.samples, slot.degree))
    return tuple(_reallocate(problem, waves[wave]) for wave in sorted(waves))


def _reallocate(problem: Problem, wave: list[Pack]) -> Wave:
    degrees = threshold(problem.table_s([pack.load for pack in wave]))
    return tuple(Pack(p.samples, p.load, d) for p, d in zip(wave, degrees, strict=True))
