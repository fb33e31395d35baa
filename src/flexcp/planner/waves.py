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
from flexcp.planner.placement import FreeRanks, Group, crosses_nodes, place
from flexcp.planner.problem import Array, Assignment, Integers, Pack, Problem, Wave

# Wave counts tried from the first that works; targets tried for each.
_WAVE_COUNTS, _TARGETS = 4, 7
# Results whose degrees are made exact.
_EXACT = 3
# A target is not sought more closely than this; nor once a count is so far from the best so far.
_CLOSE, _HOPELESS = 1.002, 1.03
# Longest samples that set the length of a wave, and packs looked at for a sample from either side.
_HEADS, _LOOKS = 8, 8
_ROUNDING = 1 + 1e-9


@dataclass(slots=True)
class _Slot:
    """A pack in the making: its wave and ranks, seconds at speed 1, room in tokens, and samples."""

    wave: int
    ranks: Group
    crosses: bool
    filled_s: float
    room: int
    samples: list[int] = field(default_factory=list)

    @property
    def degree(self) -> int:
        return len(self.ranks)


@dataclass(slots=True)
class _Filled:
    """Waves of slots, the rank-seconds of the samples that found none, and how long the step is."""

    slots: list[_Slot]
    left_s: float
    step_s: float
    # Rank-seconds by which the last wave is not full, and the waves that last as long as the target.
    spare_s: float
    at_target: int


def search(problem: Problem, goal_s: float) -> list[Assignment]:
    """The best few assignments, degrees inside each wave made optimal; the best one first is not promised.

    For a few numbers of waves the least target is sought at which all samples find a place, then for the best
    numbers again with long samples on more and on fewer ranks. The results are compared by their makespan
    before degrees are made exact.

    Complexity: O(numbers · targets · waves · K log K), and a threshold search for each wave of the best.
    """
    first = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    samples = long_samples(problem, 0.5 * lower_bound_s(problem) / (first + _HEADS))
    filler = _Filler(problem, samples)
    count = max(first, len(forced_lengths_s(problem, samples)))
    made: list[_Filled] = []
    counts = 0
    while counts < _WAVE_COUNTS and (count <= problem.size or not made):
        best_s = min([filled.step_s for filled in made], default=np.inf)
        if best_s <= goal_s:
            break
        made += _lowest(filler, count, best_s)
        counts += bool(made)
        count += 1 if made else 1 + count // 16
    made.sort(key=lambda filled: filled.step_s)
    return [_exact(problem, filled.slots) for filled in made[:_EXACT]]


def _lowest(filler: _Filler, num_waves: int, best_s: float) -> list[_Filled]:
    """Steps found by seeking the least target that suffices for so many waves; none if memory forbids them.

    What is left over, or the room in the last wave, says by how much the target is wrong: the next target
    spreads it over all waves that last as long as the target; where that leaves the bracket, it is halved.
    """
    problem = filler.problem
    pack_s, ranks = problem.cost.pack_s, problem.cluster.rank_equivalents
    average_s = problem.total_work_s / ranks / num_waves
    low_s, high_s, target_s = 0.3 * average_s, 2.0 * average_s + pack_s, average_s + pack_s
    found: list[_Filled] = []
    for number in range(_TARGETS):
        made = filler.fill(num_waves, target_s)
        share_s = ranks * max(1, made.at_target)
        if made.left_s > 0:
            low_s = target_s
            target_s += made.left_s / share_s
        else:
            high_s = target_s
            found.append(made)
            target_s -= made.spare_s / share_s
        if high_s <= low_s * _CLOSE or (number > 2 and not found):
            break
        if found and number > 1 and min(x.step_s for x in found) > _HOPELESS * best_s:
            break
        if not low_s * _CLOSE < target_s < high_s / _CLOSE:
            target_s = (low_s + high_s) / 2
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
        self._densest = np.argsort(-problem.work_s / problem.counts[:, 0], kind="stable")
        self._order: list[int] = np.argsort(-problem.work_s, kind="stable").tolist()
        self._row = {sample: row for row, sample in enumerate(samples.index.tolist())}

    def fill(self, num_waves: int, target_s: float) -> _Filled:
        """Slots of up to `num_waves` waves.

        A wave lasts as long as the longest sample left needs, at least the target. A sample that cannot meet
        the target takes the least degree within `slack` of its best time: more slack spends fewer ranks on
        it and makes its wave longer. The others take the least degree that meets the wave, so long waves
        hold the densest samples on few ranks; what has no place waits.
        """
        left, made = self._order, list[_Slot]()
        step_s = spare_s = 0.0
        at_target = 0
        for wave in range(num_waves):
            end_s = self._end_s(left, target_s)
            at_target += end_s == target_s
            first = len(made)
            left = self._wave(wave, end_s, left, made)
            speed = self.problem.cluster.speed
            step_s += max([slot.filled_s / speed(slot.ranks) for slot in made[first:]], default=0.0)
            if not left:
                busy_s = sum([slot.filled_s * slot.degree for slot in made[first:]])
                spare_s = max(0.0, end_s * self.problem.cluster.rank_equivalents - busy_s)
                break
        left_s = sum([self._work_s[sample] for sample in left])
        return _Filled(made, left_s, step_s, spare_s, at_target)

    def _end_s(self, left: list[int], target_s: float) -> float:
        """How long a wave lasts: the target, or what its longest samples need.

        A sample whose best time is above the target is worth the degree d at which T(d) is least, less what
        the wave takes off the others: its own work, and the densest samples that the other ranks can hold.
        """
        heads = [self._row[sample] for sample in left[:_HEADS] if sample in self._row]
        best_s = self._samples.best_s[heads]
        if not heads or best_s.max() <= target_s:
            return target_s
        row = heads[int(best_s.argmax())]
        sample = int(self._samples.index[row])
        degrees, times_s = self._times_s(row)
        waiting = np.zeros(self.problem.size, dtype=bool)
        waiting[left] = True
        waiting[sample] = False
        order = self._densest[waiting[self._densest]]
        upto_tokens = np.append(0, np.cumsum(self.problem.counts[order, 0]))
        upto_s = np.append(0.0, np.cumsum(self.problem.work_s[order]))
        others = self.problem.ranks - degrees
        beside_s = np.interp(others * self.problem.cluster.tokens_per_rank, upto_tokens, upto_s)
        beside_s = np.minimum(beside_s, others * times_s)
        worth_s = times_s - (self.problem.work_s[sample] + beside_s) / self.problem.ranks
        return max(target_s, float(times_s[int(worth_s.argmin())]), float(best_s.max()))

    def _times_s(self, row: int) -> tuple[Integers, Array]:
        ladder = self._samples.ladder
        degrees = np.arange(max(1, int(ladder.least[row])), self.problem.ranks + 1)
        return degrees, ladder.times_s(degrees, np.full_like(degrees, row))

    def _wave(self, wave: int, end_s: float, left: list[int], made: list[_Slot]) -> list[int]:
        """Add the slots of one wave; returns the samples that wait."""
        ladder, cluster = self._samples.ladder, self.problem.cluster
        degrees = ladder.degrees(np.maximum(end_s * cluster.top_speed, self._samples.best_s))
        wide, times_s = degrees.tolist(), ladder.times_s(degrees).tolist()
        crossing_s = self.problem.cost.seconds(ladder.columns, degrees, True).tolist()
        pack_s, capacity = self.problem.cost.pack_s, cluster.tokens_per_rank
        least_s, least = self._work_s[left[-1]], min([self._tokens[sample] for sample in left])
        free, later = FreeRanks(cluster), list[int]()
        entries: list[tuple[float, int]] = []  # rank-seconds left in a slot, ascending
        roomiest = self.problem.tokens  # no slot has more room
        for position, sample in enumerate(left):
            if not free.count and not entries:
                return later + left[position:]
            tokens, seconds, row = self._tokens[sample], self._work_s[sample], self._row.get(sample, -1)
            degree = wide[row] if row >= 0 else 1
            at = -1
            if degree == 1 and entries and entries[-1][0] >= seconds and tokens <= roomiest:
                at = self._best_fit(entries, made, sample)
                if at < 0:
                    roomiest = max([made[index].room for _, index in entries])
            if at >= 0:
                area_s, index = entries.pop(at)
                slot = made[index]
                slot.samples.append(sample)
                slot.room -= tokens
                used_s = self._area_s(sample, slot)
                slot.filled_s += used_s / slot.degree
                area_s -= used_s
            else:
                time_s = times_s[row] if degree > 1 else pack_s + seconds
                across_s = crossing_s[row] if degree > 1 else time_s
                taken = free.take(degree, time_s / end_s / _ROUNDING, across_s / end_s / _ROUNDING)
                if taken is None:
                    later.append(sample)
                    continue
                crosses = degree > 1 and crosses_nodes(taken, cluster)
                time_s = across_s if crosses else time_s
                room = room_tokens(self.problem, degree) if degree > 1 else capacity
                slot, index = _Slot(wave, taken, crosses, time_s, room - tokens, [sample]), len(made)
                roomiest = max(roomiest, slot.room)
                area_s = (end_s * cluster.speed(taken) - time_s) * degree
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
                if slot.room >= tokens and self._area_s(sample, slot) <= area_s:
                    return near
        return -1

    def _area_s(self, sample: int, slot: _Slot) -> float:
        """Rank-seconds that a sample adds to a pack at most: its computation, or its traffic if longer."""
        work_s, degree = self._work_s[sample], slot.degree
        if degree == 1 or not self._cut_tokens[sample]:
            return work_s
        cost = self.problem.cost
        link = cost.inter if slot.crosses else cost.intra
        traffic_s = (degree - 1) * cost.kv_bytes_per_token * self._cut_tokens[sample] / link.bytes_per_s
        hidden_s = self._pair_s[sample]
        return work_s + max(0.0, traffic_s - hidden_s) + (degree - 1) * cost.sample_s


def _exact(problem: Problem, slots: list[_Slot]) -> Assignment:
    """Waves of packs, each as it was filled or with the best degrees for its packs, whichever is shorter."""
    waves: dict[int, list[_Slot]] = {}
    for slot in slots:
        waves.setdefault(slot.wave, []).append(slot)
    return tuple(_shorter(problem, waves[wave]) for wave in sorted(waves))


def _shorter(problem: Problem, slots: list[_Slot]) -> Wave:
    filled = problem.packs([slot.samples for slot in slots], [slot.ranks for slot in slots])
    degrees = threshold(problem.table_s([pack.load for pack in filled]))
    groups = place(degrees, problem.cluster)
    exact = [Pack(p.samples, p.load, len(g), g) for p, g in zip(filled, groups, strict=True)]
    return tuple(min(exact, filled, key=lambda wave: max(map(problem.placed_s, wave))))
