"""What one policy makes of the same steps: the means over its plans, or why it cannot serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flexcp.core.plan import Plan
from flexcp.cost.model import CostModel
from flexcp.planner.timeline import PlacedLoads


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a comparison of policies.

    Attributes:
        policy: its name, with its setting where there is one (`static d=8`).
        refusal: why there is no plan; then nothing below is known.
        step_s, bound_s: means of a step.
        waves: mean number a step.
        degrees: number of tasks per degree over all steps, ascending.
        idle_share: share of all rank-time in which no task runs.
        communication_share: share of all rank-time spent on messages that no computation hides.
        plan_ms: mean planning time of a step.
        plans: one a step, where they are at hand.
    """

    policy: str
    refusal: str = ""
    step_s: float = 0.0
    bound_s: float = 0.0
    waves: float = 0.0
    degrees: Mapping[int, int] = field(default_factory=dict)
    idle_share: float = 0.0
    communication_share: float = 0.0
    plan_ms: float = 0.0
    plans: tuple[Plan, ...] = ()

    @property
    def gap(self) -> float:
        """Step time over bound, all steps together."""
        return self.step_s / self.bound_s


def outcome_of(
    policy: str, plans: Sequence[Plan], costs: Sequence[CostModel], plan_ms: float = 0.0
) -> Outcome:
    """The means of at least one plan.

    Args:
        policy: what the row is called.
        plans: one a step.
        costs: what each was made with.
        plan_ms: mean planning time of a step.
    """
    steps, total_s = len(plans), sum(plan.step_s for plan in plans)
    degrees: Counter[int] = Counter()
    for plan in plans:
        degrees.update(plan.degrees)
    return Outcome(
        policy,
        step_s=total_s / steps,
        bound_s=sum(plan.bound_s for plan in plans) / steps,
        waves=sum(plan.num_waves for plan in plans) / steps,
        degrees=dict(sorted(degrees.items())),
        idle_share=sum(plan.idle_share * plan.step_s for plan in plans) / total_s,
        communication_share=sum(map(communication_share, plans, costs)) / steps,
        plan_ms=plan_ms,
        plans=tuple(plans),
    )


def communication_share(plan: Plan, cost: CostModel) -> float:
    """Share of all rank-time that ranks spend on messages which no computation hides."""
    loads = PlacedLoads.of(plan, cost)
    model_s = loads.seconds(cost)
    shares = np.divide(loads.message_seconds(cost), model_s, out=np.zeros_like(model_s), where=model_s > 0)
    rank_s = np.array([task.degree * task.duration_s for task in plan.tasks])
    return float(shares @ rank_s) / (plan.step_s * plan.cluster.ranks)
