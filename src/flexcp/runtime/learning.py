"""Costs learnt while training: measured tasks of a step correct the plans of the steps behind it.

A plan is asked for while others run, so it uses what was known three steps before its own. Which that is
depends on step numbers alone, never on how long anything took; a checkpoint keeps what the coming plans use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flexcp.core.errors import CheckpointError, InputError
from flexcp.core.plan import Plan
from flexcp.cost.correction import Correction, MeasuredTasks
from flexcp.planner import Planner
from flexcp.planner.placement import crosses_nodes
from flexcp.planner.problem import Problem

# The plan of step s is asked for when step s - 2 opens, so all that it can know is up to step s - 3.
LAG = 3


class Learning:
    """The corrections of a run; on the rank that plans, since nobody else needs them.

    Args:
        planner: with the calibrated cost model, which stays what corrections refer to.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._after: dict[int, Correction] = {}

    @property
    def latest(self) -> Correction:
        """What has been learnt so far."""
        return self._after[max(self._after)] if self._after else Correction()

    def planner(self, step: int) -> Planner:
        """The planner for one step."""
        return replace(self._planner, cost=self.known_for(step).apply(self._planner.cost))

    def known_for(self, step: int) -> Correction:
        """What the plan of a step is made with; remembered until the step is learnt from."""
        return self._after.get(step - LAG, Correction())

    def learn(self, step: int, plan: Plan, durations_s: Sequence[Sequence[float]]) -> None:
        """Take in a step.

        Args:
            step: its index; steps come in order.
            plan: what ran.
            durations_s: for each rank the seconds of its tasks, in order; missing or NaN where unknown.
        """
        seconds = np.full(len(plan.tasks), np.inf)
        for rank, durations in enumerate(durations_s):
            for index, time_s in zip(plan.tasks_of(rank), durations, strict=False):
                # Ranks that come early wait for the others; the last to come knows how long the task takes.
                seconds[index] = min(seconds[index], time_s)
        tasks = MeasuredTasks(
            counts=Problem.of_plan(plan, self._planner.cost).totals_of(plan.tasks),
            degree=np.array([task.degree for task in plan.tasks]),
            crosses=np.array([crosses_nodes(task.ranks, plan.cluster) for task in plan.tasks]),
            exchanges=[task.exchange for task in plan.tasks],
            seconds=seconds * [plan.cluster.speed(task.ranks) for task in plan.tasks],
        )
        self._after[step] = self.latest.update(self._planner.cost, tasks)
        for old in [known for known in self._after if known < step - LAG]:
            del self._after[old]

    def state_dict(self) -> dict[str, Any]:
        """What the coming plans need; JSON."""
        return {str(step): correction.to_json() for step, correction in self._after.items()}

    def load_state_dict(self, state: dict[str, Any], next_step: int) -> None:
        """Continue with `next_step` where `state_dict` was taken.

        Raises:
            CheckpointError: it is damaged.
        """
        try:
            self._after = {int(step): Correction.from_json(values) for step, values in state.items()}
            if len(self._after) > LAG + 1 or any(step >= next_step for step in self._after):
                raise InputError(f"it is of the steps {sorted(self._after)}", "Continue without it.")
        except (InputError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the learnt costs of the checkpoint cannot be read ({getattr(error, 'cause', error)})",
                "Continue with parallel.learn_costs = false.",
            ) from error
