"""When each pack runs: waves of packs become tasks with ranks, start and end.

Predicted seconds only; nothing is chosen here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from flexcp.core.cluster import Cluster
from flexcp.core.plan import ExchangeKind, Plan, Task
from flexcp.cost.model import CostModel
from flexcp.planner.placement import Group, crosses_nodes, place
from flexcp.planner.problem import Array, Assignment, Integers, Problem, Wave

Placed = tuple[int, Group, Sequence[int], float]


def schedule(problem: Problem, assignment: Assignment) -> tuple[Task, ...]:
    """Tasks of waves of packs; packs without ranks are placed."""
    groups = [group for wave in assignment for group in _groups(wave, problem)]
    packs = [pack.samples for wave in assignment for pack in wave]
    waves = [number for number, wave in enumerate(assignment) for _ in wave]
    seconds = placed_s(problem, packs, groups)
    return run_in_order(problem, sorted(zip(waves, groups, packs, seconds, strict=True)))


def assignment_s(problem: Problem, assignment: Assignment) -> float:
    """Seconds of a step in the mode of the problem."""
    return makespan_s(schedule(problem, assignment))


def run_in_order(problem: Problem, placed: Iterable[Placed]) -> tuple[Task, ...]:
    """Tasks with start and end, in an order that every rank follows.

    Lockstep: a wave starts when all earlier tasks have ended. Free-running: a task starts when its own
    ranks have finished theirs. All ranks take their tasks in this one order, so the first unfinished task
    of the list can always run, and no rank waits in a circle.

    Args:
        problem: whose positions packs hold.
        placed: wave, ranks, pack and seconds of each task, sorted.
    """
    order, exchange, lockstep = problem.order, problem.cost.exchange, problem.mode == "lockstep"
    tasks: list[Task] = []
    free_s = [0.0] * problem.ranks
    last = 0
    for wave, group, pack, time_s in placed:
        if lockstep and wave != last:
            free_s, last = [max(free_s)] * problem.ranks, wave
        start_s = free_s[group[0]] if len(group) == 1 else max([free_s[rank] for rank in group])
        end_s = start_s + time_s
        for rank in group:
            free_s[rank] = end_s
        positions = tuple(sorted([order[sample] for sample in pack]))
        tasks.append(Task(positions, group, wave, start_s, end_s, exchange))
    return tuple(tasks)


def placed_s(problem: Problem, packs: Sequence[Sequence[int]], groups: Sequence[Group]) -> list[float]:
    """Seconds of every pack, given by the positions of its samples, on its ranks."""
    cluster = problem.cluster
    speeds = np.array([cluster.speed(group) for group in groups]) if cluster.speeds else 1.0
    exchanges = [problem.cost.exchange] * len(groups)
    placed = seconds_on(problem.totals(packs), groups, exchanges, cluster, problem.cost) / speeds
    seconds: list[float] = placed.tolist()
    return seconds


def seconds_on(
    counts: Integers,
    groups: Sequence[Group],
    exchanges: Sequence[ExchangeKind],
    cluster: Cluster,
    cost: CostModel,
) -> Array:
    """Seconds of packs on their groups, all ranks at full speed, in one call of the cost model an exchange.

    Args:
        counts: a row of `Problem.totals` for each pack.
        groups: ranks of each pack.
        exchanges: how they meet.
        cluster: how ranks sit in nodes.
        cost: the formula.
    """
    degrees = np.array([len(group) for group in groups])
    crosses = np.array([len(group) > 1 and crosses_nodes(group, cluster) for group in groups])
    columns = counts.astype(np.float64).T
    kinds = sorted(set(exchanges))
    seconds = cost.with_exchange(kinds[0]).seconds(columns, degrees, crosses)
    for kind in kinds[1:]:
        meets_so = np.array([exchange == kind for exchange in exchanges])
        seconds = np.where(meets_so, cost.with_exchange(kind).seconds(columns, degrees, crosses), seconds)
    return seconds


@dataclass(frozen=True, slots=True)
class PlacedLoads:
    """What the tasks of a plan hold, where and how they meet: all that their seconds depend on, speeds aside.

    Attributes:
        counts: a row of `Problem.totals` for each task.
        groups, exchanges: their ranks, and how these meet.
        cluster: how ranks sit in nodes.
    """

    counts: Integers
    groups: Sequence[Group]
    exchanges: Sequence[ExchangeKind]
    cluster: Cluster

    @classmethod
    def of(cls, plan: Plan, cost: CostModel) -> PlacedLoads:
        """Those of a plan; `cost` may be any."""
        counts = Problem.of_plan(plan, cost).totals_of(plan.tasks)
        groups, exchanges = [task.ranks for task in plan.tasks], [task.exchange for task in plan.tasks]
        return cls(counts, groups, exchanges, plan.cluster)

    def seconds(self, cost: CostModel) -> Array:
        """Of every task, each by its own exchange."""
        return seconds_on(self.counts, self.groups, self.exchanges, self.cluster, cost)

    def message_seconds(self, cost: CostModel) -> Array:
        """The part of `seconds` that messages take and no computation hides."""
        return self.seconds(cost) - self.seconds(cost.silent())


def _groups(wave: Wave, problem: Problem) -> tuple[Group, ...]:
    """Ranks of each pack: those a policy chose, for all packs of a wave or for none."""
    if wave[0].ranks:
        return tuple(pack.ranks for pack in wave)
    return place([pack.degree for pack in wave], problem.cluster)


def makespan_s(tasks: tuple[Task, ...]) -> float:
    """Seconds until the last task ends."""
    return max(task.end_s for task in tasks)


def fill_s(plan: Plan, stages: int) -> float:
    """Seconds that filling a pipeline adds to a lockstep plan whose times are those of one stage.

    Jobs that take equally long on every machine of a line, in one order, take their sum and once more the
    longest of them for every further machine, in whatever order they come (the proportionate flow shop).
    """
    return (stages - 1) * max(max(task.duration_s for task in wave) for wave in plan.waves)
