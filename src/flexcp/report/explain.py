"""Why a plan is as it is: the bound that limits it, the degree of each long sample."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.core.plan import Plan, Task
from flexcp.cost.model import CostModel, Load
from flexcp.planner.placement import crosses_nodes


def task_load(plan: Plan, task: Task) -> Load:
    """What a task holds."""
    return Load.of_pack(plan.pack(task), plan.whole_below_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """The degree of one long sample.

    Attributes:
        sample: its id.
        tokens: its length.
        others: samples in the same pack.
        degree: what it got.
        seconds: time of its pack at this degree.
        less_s, more_s: with one rank less or more; None where memory or the cluster forbids it.
        reason: why this degree.
    """

    sample: int
    tokens: int
    others: int
    degree: int
    seconds: float
    less_s: float | None
    more_s: float | None
    reason: str


def explain(plan: Plan, cost: CostModel, most: int = 8) -> tuple[Choice, ...]:
    """The longest samples of a plan, longest first, as far as they are on several ranks."""
    found = []
    for task in plan.tasks:
        if task.degree > 1:
            longest = max(plan.pack(task), key=lambda sample: sample.tokens)
            found.append((-longest.tokens, longest.id, task))
    return tuple(_choice(plan, task, cost) for *_, task in sorted(found, key=lambda item: item[:2])[:most])


def _choice(plan: Plan, task: Task, cost: CostModel) -> Choice:
    pack = plan.pack(task)
    longest = max(pack, key=lambda sample: (sample.tokens, -sample.id))
    load, cost = task_load(plan, task), cost.with_exchange(task.exchange)
    # Slow ranks stretch the model's time, and would at any degree.
    stretch = task.duration_s / cost.task_s(load, task.degree, crosses_nodes(task.ranks, plan.cluster))

    def seconds(degree: int) -> float | None:
        if not plan.cluster.min_degree(load.tokens) <= degree <= plan.cluster.ranks:
            return None
        return stretch * cost.task_s(load, degree, degree > plan.cluster.ranks_per_node)

    less_s, more_s = seconds(task.degree - 1), seconds(task.degree + 1)
    reason = _reason(plan, task, less_s, more_s)
    return Choice(
        longest.id, longest.tokens, len(pack) - 1, task.degree, task.duration_s, less_s, more_s, reason
    )


def _reason(plan: Plan, task: Task, less_s: float | None, more_s: float | None) -> str:
    if less_s is None:
        return "memory allows no less"
    if task.start_s + less_s > plan.step_s * (1 + 1e-9):
        return "less outlasts the step"
    if plan.mode == "lockstep":
        ends_s = max(other.end_s for other in plan.waves[_wave_index(plan, task)])
        if task.start_s + less_s > ends_s * (1 + 1e-9):
            return "less outlasts its wave"
    if more_s is not None and more_s >= task.duration_s:
        return "more is no faster"
    if _next_start_s(plan, task) is not None:
        return "less delays the next"
    return "fits the time left"


def _wave_index(plan: Plan, task: Task) -> int:
    return sorted({other.wave for other in plan.tasks}).index(task.wave)


def _next_start_s(plan: Plan, task: Task) -> float | None:
    """When the first later task on one of its ranks starts."""
    later = [plan.tasks[index].start_s for rank in task.ranks for index in plan.tasks_of(rank)]
    return min((start_s for start_s in later if start_s >= task.end_s), default=None)
