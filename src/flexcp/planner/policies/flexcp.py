"""Policy `flexcp`, the default: plans the whole global batch at once, by time, within memory.

Never worse than `paper` or `static`: their plans are candidates too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from flexcp.planner.allocation import least_degrees, threshold
from flexcp.planner.balance import Slot, fill, room_tokens
from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.list_schedule import list_schedule
from flexcp.planner.policies import paper, static
from flexcp.planner.problem import Assignment, Pack, Problem, Wave
from flexcp.planner.timeline import makespan_s, schedule

# Wave counts tried from the least that memory allows, and how many of them are looked at closely.
_WAVE_COUNTS = 8
_CLOSE_LOOKS = 3
# Targets tried, relative to the one at which rank-time is used up exactly.
_FACTORS = (0.97, 1.03, 1.07, 1.15)
_BISECTIONS = 16
# No more is tried once a plan is within this factor of the bound.
_CLOSE_ENOUGH = 1.005
# Free-running: the longest that one long sample may run, as shares of the bound of the step.
_STEP_SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)
# Slacks tried, see `_Shape`; the first is where the search starts.
_SLACKS = (1.15, 1.0, 1.05, 1.3)


def assign(problem: Problem) -> Assignment:
    """Choose wave count and target; give long samples degrees to meet it, fill up with short ones.

    For a wave count W, the target is where the rank-time of all samples at their least degrees with
    T <= target equals W·N·target. Groups go into waves by falling time; what room is left, on single ranks
    and inside groups, is filled longest first. Then degrees inside each wave are made optimal exactly.

    Free-running, `list_schedule` comes first; full waves are searched only if it stays far from the bound.

    Complexity: O(waves · (K·N + K log K)).
    """
    candidates: list[Assignment] = []
    if problem.mode == "free-running":
        candidates += [list_schedule(problem, share) for share in _STEP_SHARES]
    goal_s = _CLOSE_ENOUGH * lower_bound_s(problem)
    if not any(_step_s(problem, candidate) <= goal_s for candidate in candidates):
        candidates += _search(problem)
    candidates += [paper.assign(problem), static.assign(problem)]
    return min(candidates, key=lambda candidate: _step_s(problem, candidate))


def _step_s(problem: Problem, assignment: Assignment) -> float:
    return makespan_s(schedule(problem, assignment))


class _Shape(NamedTuple):
    """What is searched: waves, target relative to the balanced one, slack for samples that miss it.

    A sample that cannot meet the target takes the least degree within `slack` of its best time. More slack
    spends fewer ranks on long samples and makes their wave longer.
    """

    num_waves: int
    factor: float = 1.0
    slack: float = _SLACKS[0]


def _search(problem: Problem) -> list[Assignment]:
    """The best few assignments in full waves, by their makespan before placement.

    Wave counts first, then slacks, then targets, each time around the few best shapes so far.
    """
    made: dict[_Shape, tuple[float, Assignment]] = {}

    def look(shapes: Iterable[_Shape]) -> list[_Shape]:
        for shape in shapes:
            if shape not in made and (attempt := _attempt(problem, shape)):
                made[shape] = attempt
        return sorted(made, key=lambda shape: (made[shape][0], shape))[:_CLOSE_LOOKS]

    first = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    leaders = look(_Shape(w) for w in range(first, min(first + _WAVE_COUNTS, len(problem.loads) + 1)))
    leaders = look(shape._replace(slack=slack) for shape in leaders for slack in _SLACKS)
    leaders = look(shape._replace(factor=factor) for shape in leaders for factor in _FACTORS)
    return [made[shape][1] for shape in leaders]


def _attempt(problem: Problem, shape: _Shape) -> tuple[float, Assignment] | None:
    """Makespan and assignment of one shape; None if it does not fit into its waves."""
    target_s = shape.factor * _balanced_target_s(problem, shape)
    table_s = problem.sample_table_s
    degrees = _degrees(problem, target_s, shape.slack)
    seconds = table_s[np.arange(len(degrees)), degrees - 1]
    slots = _open_slots(problem, shape.num_waves, target_s, degrees.tolist(), seconds.tolist())
    if slots is None:
        return None
    singles = [k for k in range(len(degrees)) if degrees[k] == 1]
    singles.sort(key=lambda k: (-problem.work_s[k], k))
    if not fill([slot for wave in slots for slot in wave], singles, problem):
        return None
    waves = [[problem.pack(s.samples, s.degree) for s in wave if s.samples] for wave in slots]
    best = [_reallocate(wave, problem) for wave in waves if wave]
    return sum(seconds for seconds, _ in best), tuple(wave for _, wave in best)


def _balanced_target_s(problem: Problem, shape: _Shape) -> float:
    """Seconds per wave at which the samples' rank-time just fills all waves; by bisection."""
    table_s, rows = problem.sample_table_s, np.arange(len(problem.loads))
    low = float(problem.work_s.sum()) / problem.ranks / shape.num_waves
    high = low + float(table_s.min(axis=1).max()) * len(problem.loads)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        degrees = _degrees(problem, middle, shape.slack)
        wide = degrees > 1
        area_s = float((table_s[rows, degrees - 1] * degrees)[wide].sum() + problem.work_s[~wide].sum())
        if area_s <= shape.num_waves * problem.ranks * (middle - problem.cost.pack_s):
            high = middle
        else:
            low = middle
    return high


def _degrees(problem: Problem, target_s: float, slack: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    table_s = problem.sample_table_s
    return least_degrees(table_s, np.maximum(target_s, slack * table_s.min(axis=1))[:, None])


def _open_slots(
    problem: Problem, num_waves: int, target_s: float, degrees: list[int], seconds: list[float]
) -> list[list[Slot]] | None:
    """One slot per group of a long sample, one per rank left over; None if the groups need more waves."""
    waves: list[list[Slot]] = [[] for _ in range(num_waves)]
    free, longest_s = [problem.ranks] * num_waves, [target_s] * num_waves
    groups = sorted((k for k, d in enumerate(degrees) if d > 1), key=lambda k: (-seconds[k], -degrees[k], k))
    for k in groups:
        wave = next((w for w in range(num_waves) if free[w] >= degrees[k]), None)
        if wave is None:
            return None
        free[wave] -= degrees[k]
        longest_s[wave] = max(longest_s[wave], seconds[k])
        room = room_tokens(problem, degrees[k]) - problem.loads[k].tokens
        waves[wave].append(Slot(seconds[k], room, degrees[k], [k]))
    single_room, pack_s = problem.cluster.tokens_per_rank, problem.cost.pack_s
    for wave, slots in enumerate(waves):
        slots += [Slot(pack_s, single_room, 1) for _ in range(free[wave])]
        for slot in slots:
            slot.filled_s -= longest_s[wave]  # least filled is then: most time left in its wave
    return waves


def _reallocate(wave: list[Pack], problem: Problem) -> tuple[float, Wave]:
    """Best degrees for the packs of a wave, and its makespan."""
    table_s = problem.table_s([pack.load for pack in wave])
    degrees = threshold(table_s)
    seconds = max(float(row[degree - 1]) for row, degree in zip(table_s, degrees, strict=True))
    return seconds, tuple(Pack(p.samples, p.load, d) for p, d in zip(wave, degrees, strict=True))
