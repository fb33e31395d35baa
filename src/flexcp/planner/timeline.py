"""When each pack runs: waves of packs become tasks with ranks, start and end.

Predicted seconds only; nothing is chosen here.
"""

from __future__ import annotations

from flexcp.core.plan import Task
from flexcp.planner.placement import Group, crosses_nodes, place
from flexcp.planner.problem import Assignment, Problem, Wave


def schedule(problem: Problem, assignment: Assignment) -> tuple[Task, ...]:
    """Tasks in an order that every rank follows, sorted by wave, then by first rank.

    Lockstep: a wave starts when all earlier tasks have ended. Free-running: a task starts when its own
    ranks have finished theirs. All ranks take their tasks in this one order, so the first unfinished task
    of the list can always run, and no rank waits in a circle.
    """
    tasks: list[Task] = []
    free_s = [0.0] * problem.ranks
    for number, wave in enumerate(assignment):
        groups = _groups(wave, problem)
        if problem.mode == "lockstep":
            free_s = [max(free_s)] * problem.ranks
        for group, pack in sorted(zip(groups, wave, strict=True), key=lambda item: item[0]):
            start_s = max(free_s[rank] for rank in group)
            crosses = crosses_nodes(group, problem.cluster)
            seconds = problem.cost.task_s(pack.load, pack.degree, crosses)
            end_s = start_s + seconds / problem.cluster.speed(group)
            for rank in group:
                free_s[rank] = end_s
            positions = tuple(sorted(problem.order[sample] for sample in pack.samples))
            tasks.append(Task(positions, group, number, start_s, end_s))
    return tuple(tasks)


def _groups(wave: Wave, problem: Problem) -> tuple[Group, ...]:
    """Ranks of each pack: those a policy chose, for all packs of a wave or for none."""
    if wave[0].ranks:
        return tuple(pack.ranks for pack in wave)
    return place([pack.degree for pack in wave], problem.cluster)


def makespan_s(tasks: tuple[Task, ...]) -> float:
    """Seconds until the last task ends."""
    return max(task.end_s for task in tasks)
