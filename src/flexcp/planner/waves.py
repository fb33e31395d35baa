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

# Wave counts tried from the first that works, and targets tried for each: more find next to nothing better.
_WAVE_COUNTS, _TARGETS = 4, 7
# Results whose degrees are improved; a step is known before, so only close ones may change places.
_FINISHED = 3
# Targets are sought within these shares of the average work of a wave, no more closely than this; a count
# is left after a few targets if none had a plan, or if they are this far from the best of other counts.
_BRACKET, _CLOSE = (0.3, 2.0), 1.002
_FEW_TARGETS, _HOPELESS = 3, 1.03
# A step has about as many waves as memory forces and some more; half of the average over so many is the time
# above which a sample may ever need several ranks.
_MORE_WAVES = 8
# Waves filled in all before no more targets are tried: where memory forces hundreds, a few targets must do.
_MOST_WAVES = 2500
# Samples with most work that are asked how long a wave must last; packs that are looked at for a sample.
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
    """What came of one target.

    Attributes:
        slots: the packs of all waves.
        step_s: how long they take.
        left_s: rank-seconds of the samples that found no place; a plan has none.
        spare_s: rank-seconds for which the last wave still had room.
        at_target: waves that last as long as the target, so that another target would change them.
    """

    slots: list[_Slot]
    step_s: float
    left_s: float
    spare_s: float
    at_target: int


def search(problem: Problem, goal_s: float) -> list[Assignment]:
    """The best few assignments, degrees inside each wave made optimal; the best one first is not promised.

    For a few numbers of waves, from the least that memory allows, the least target is sought at which all
    samples find a place. The search ends with the first step that meets the goal.

    Complexity: O(numbers · targets · waves · K log K), and a threshold search for each wave of the best.
    """
    first = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    samples = long_samples(problem, 0.5 * lower_bound_s(problem) / (first + _MORE_WAVES))
    filler = _Filler(problem, samples)
    count = max(first, len(forced_lengths_s(problem, samples)))
    made: list[_Filled] = []
    counts = 0
    while counts < _WAVE_COUNTS and count <= problem.size:
        best_s = min([filled.step_s for filled in made], default=np.inf)
        if best_s <= goal_s or (made and filler.waves > _MOST_WAVES):
            break
        made += _lowest(filler, count, best_s)
        counts += bool(made)
        # Until a count works, memory is in the way: many waves are not tried one by one.
        count += 1 if made else min(1 + count // 16, max(1, problem.size - count))
    made.sort(key=lambda filled: filled.step_s)
    return [_finish(problem, filled.slots) for filled in made[:_FINISHED]]


def _lowest(filler: _Filler, num_waves: int, best_s: float) -> list[_Filled]:
    """Steps found by seeking the least target that suffices for so many waves; none if memory forbids them.

    What is left over, or the room in the last wave, says by how much the target is wrong: the next target
    spreads it over all waves that last as long as the target; where that leaves the bracket, it is halved.
    """
    problem = filler.problem
    pack_s, ranks = problem.cost.pack_s, problem.cluster.rank_equivalents
    average_s = problem.total_work_s / ranks / num_waves
    low_s, high_s = _BRACKET[0] * average_s, _BRACKET[1] * average_s + pack_s
    target_s = average_s + pack_s
    found: list[_Filled] = []
    for number in range(1, _TARGETS + 1):
        made = filler.fill(num_waves, target_s)
        share_s = ranks * max(1, made.at_target)
        if made.left_s > 0:
            low_s = target_s
            target_s += made.left_s / share_s
        else:
            high_s = target_s
            found.append(made)
            target_s -= made.spare_s / share_s
        reached_s = min([filled.step_s for filled in found], default=np.inf)
        if high_s <= low_s * _CLOSE or (number >= _FEW_TARGETS and reached_s > _HOPELESS * best_s):
            break
        if number > _FEW_TARGETS and not found:
            break
        if found and filler.waves > _MOST_WAVES:
            break
        if not low_s * _CLOSE < target_s < high_s / _CLOSE:
            target_s = (low_s + high_s) / 2
    if num_waves == problem.size and not found:
        found.append(filler.fill(num_waves, np.inf))  # every sample by itself: always a plan
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
        self._in_time: tuple[float, tuple[list[int], list[float], list[float]]] = (-1.0, ([], [], []))
        self.waves = 0  # filled so far

    def fill(self, num_waves: int, target_s: float) -> _Filled:
        """Slots of up to `num_waves` waves of at least the target each.

        A sample that cannot meet its wave runs as fast as it can; the others take the least degree that
        meets the wave, so long waves hold the densest samples on few ranks; what has no place waits.
        """
        cluster = self.problem.cluster
        left, slots = self._order, list[_Slot]()
        step_s = spare_s = 0.0
        at_target = 0
        for number in range(num_waves):
            end_s = self._end_s(left, target_s)
            at_target += end_s == target_s
            self.waves += 1
            wave = _Wave(self, number, end_s)
            left = wave.take(left)
            slots += wave.slots
            step_s += max([slot.filled_s / cluster.speed(slot.ranks) for slot in wave.slots], default=0.0)
            if not left:
                busy_s = sum([slot.filled_s * slot.degree for slot in wave.slots])
                spare_s = max(0.0, end_s * cluster.rank_equivalents - busy_s)
                break
        left_s = sum([self._work_s[sample] for sample in left])
        return _Filled(slots, step_s, left_s, spare_s, at_target)

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
        worth_s = times_s - (self.problem.work_s[sample] + beside_s) / self.problem.cluster.rank_equivalents
        return max(target_s, float(times_s[int(worth_s.argmin())]), float(best_s.max()))

    def _times_s(self, row: int) -> tuple[Integers, Array]:
        ladder = self._samples.ladder
        degrees = np.arange(max(1, int(ladder.least[row])), self.problem.ranks + 1)
        return degrees, ladder.times_s(degrees, np.full_like(degrees, row))

    def in_time(self, end_s: float) -> tuple[list[int], list[float], list[float]]:
        """For each long sample: least degree that meets `end_s`, seconds at it inside a node and across."""
        if end_s != self._in_time[0]:  # most waves last as long as the one before
            ladder = self._samples.ladder
            degrees = ladder.degrees(np.maximum(end_s, self._samples.best_s))
            across_s = self.problem.cost.seconds(ladder.columns, degrees, True)
            found = degrees.tolist(), ladder.times_s(degrees).tolist(), across_s.tolist()
            self._in_time = end_s, found
        return self._in_time[1]

    def row(self, sample: int) -> int:
        """Which of the long samples it is, -1 if none."""
        return self._row.get(sample, -1)

    def tokens(self, sample: int) -> int:
        """Its length."""
        return self._tokens[sample]

    def work_s(self, sample: int) -> float:
        """Its rank-seconds in any pack."""
        return self._work_s[sample]

    def area_s(self, sample: int, slot: _Slot) -> float:
        """Rank-seconds that a sample adds to a pack at most: its computation, or its traffic if longer."""
        work_s, degree = self._work_s[sample], slot.degree
        if degree == 1 or not self._cut_tokens[sample]:
            return work_s
        cost = self.problem.cost
        link = cost.inter if slot.crosses else cost.intra
        traffic_s = (degree - 1) * cost.kv_bytes_per_token * self._cut_tokens[sample] / link.bytes_per_s
        hidden_s = self._pair_s[sample]
        return work_s + max(0.0, traffic_s - hidden_s) + (degree - 1) * cost.sample_s


class _Wave:
    """One wave while it is filled; its length is given."""

    def __init__(self, filler: _Filler, number: int, end_s: float) -> None:
        self.slots: list[_Slot] = []
        self._filler = filler
        self._number = number
        self._end_s = end_s
        self._degrees, self._inside_s, self._across_s = filler.in_time(end_s)
        self._free = FreeRanks(filler.problem.cluster)
        # (rank-seconds left, slot), ascending: slots that may take more.
        self._entries: list[tuple[float, int]] = []

    def take(self, samples: list[int]) -> list[int]:
        """Samples by falling work, each into the slot that it leaves fullest, else into one of its own.

        Returns those that wait.
        """
        filler, entries = self._filler, self._entries
        least_s = filler.work_s(samples[-1])
        least = min([filler.tokens(sample) for sample in samples])
        later: list[int] = []
        roomiest, stale = filler.problem.tokens, False  # no slot has room for more than the roomiest
        for position, sample in enumerate(samples):
            if not self._free.count and not entries:
                return later + samples[position:]
            tokens, seconds, row = filler.tokens(sample), filler.work_s(sample), filler.row(sample)
            degree = self._degrees[row] if row >= 0 else 1
            at = -1
            if degree == 1 and entries and entries[-1][0] >= seconds and tokens <= roomiest:
                at = self._best_fit(sample, tokens, seconds)
                if at < 0 and stale:
                    roomiest, stale = max([self.slots[index].room for _, index in entries]), False
            if at >= 0:
                area_s, index = entries.pop(at)
                slot = self.slots[index]
                used_s = filler.area_s(sample, slot)
                slot.samples.append(sample)
                slot.room -= tokens
                slot.filled_s += used_s / slot.degree
                area_s -= used_s
            else:
                opened = self._open(sample, degree, row)
                if opened is None:
                    later.append(sample)
                    continue
                slot, index = opened, len(self.slots)
                area_s = (self._end_s * filler.problem.cluster.speed(slot.ranks) - slot.filled_s) * degree
                self.slots.append(slot)
                roomiest = max(roomiest, slot.room)
            stale = True
            if area_s >= least_s and slot.room >= least:
                insort(entries, (area_s, index))
        return later

    def _open(self, sample: int, degree: int, row: int) -> _Slot | None:
        """A slot with this sample on free ranks that end in time; the first of a wave takes any ranks."""
        problem = self._filler.problem
        pack_s = problem.cost.pack_s
        inside_s = self._inside_s[row] if degree > 1 else pack_s + self._filler.work_s(sample)
        across_s = self._across_s[row] if degree > 1 else inside_s
        in_time_s = self._end_s * _ROUNDING if self.slots else np.inf
        ranks = self._free.take(degree, inside_s / in_time_s, across_s / in_time_s)
        if ranks is None:
            return None
        crosses = degree > 1 and crosses_nodes(ranks, problem.cluster)
        # The sample alone fits; others that come to it must fit wherever they are cut.
        room = room_tokens(problem, degree) if degree > 1 else problem.cluster.tokens_per_rank
        filled_s = across_s if crosses else inside_s
        return _Slot(self._number, ranks, crosses, filled_s, room - self._filler.tokens(sample), [sample])

    def _best_fit(self, sample: int, tokens: int, seconds: float) -> int:
        """Which entry has the least time left that suffices, and room in memory; -1 if none.

        Where the first few have no room in memory, those with most time left are looked at.
        """
        entries = self._entries
        at, end = bisect_left(entries, (seconds,)), len(entries)
        for looks in (range(at, min(at + _LOOKS, end)), range(end - 1, max(at, end - _LOOKS) - 1, -1)):
            for near in looks:
                area_s, index = entries[near]
                slot = self.slots[index]
                if slot.room >= tokens and self._filler.area_s(sample, slot) <= area_s:
                    return near
        return -1


def _finish(problem: Problem, slots: list[_Slot]) -> Assignment:
    """Waves of packs, each as it was filled or with the best degrees for its packs, whichever is shorter."""
    waves: dict[int, list[_Slot]] = {}
    for slot in slots:
        waves.setdefault(slot.wave, []).append(slot)
    return tuple(_shorter(problem, waves[wave]) for wave in sorted(waves))


def _shorter(problem: Problem, slots: list[_Slot]) -> Wave:
    filled = problem.packs([slot.samples for slot in slots], [slot.ranks for slot in slots])
    degrees = threshold(problem.table_s([pack.load for pack in filled]))
    groups = place(degrees, problem.cluster)
    best = [Pack(p.samples, p.load, len(g), g) for p, g in zip(filled, groups, strict=True)]
    return tuple(min(best, filled, key=lambda wave: max(map(problem.seconds_on_ranks, wave))))
