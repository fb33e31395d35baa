"""What the tasks of one step cost on this machine and day: alone, and when they share links or cores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexcp.core.plan import Plan
from flexcp.cost.model import CostModel, Link, Load
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import seconds_on
from flexcp.simulate.conditions import Conditions
from flexcp.simulate.pace import paces
from flexcp.simulate.sharing import Sharing, seconds_at_link_share
from flexcp.simulate.split import RankTime
from flexcp.simulate.tasks import TaskTimes

Array = npt.NDArray[np.float64]

_FREE = Link(math.inf, 0.0)


class StepCosts:
    """Seconds of all tasks of one step.

    Attributes:
        seconds: of each task when it shares nothing.
    """

    def __init__(self, plan: Plan, step: int, cost: CostModel, conditions: Conditions) -> None:
        self._plan, self._cost, self._conditions = plan, cost, conditions
        self._counts = Problem.of_plan(plan, cost).totals_of(plan.tasks)
        self._groups = [task.ranks for task in plan.tasks]
        self._exchanges = [task.exchange for task in plan.tasks]
        self._model_s = seconds_on(self._counts, self._groups, self._exchanges, plan.cluster, cost)
        self._pace = paces(plan, step, conditions)
        self._alone_s = self._model_s / self._pace
        self.seconds: list[float] = self._alone_s.tolist()

    def sharing(self) -> Sharing | None:
        """What the tasks take from each other; None where there is enough of everything."""
        if not self._conditions.shares:
            return None
        shared = self._seconds_at_link_share
        uplinks, cores = self._conditions.uplinks, self._conditions.cores
        return Sharing(self._plan, self.seconds, shared, uplinks=uplinks, cores=cores)

    def _seconds_at_link_share(self, index: int, share: float) -> float:
        load = Load(*self._counts[index].tolist())
        cost = self._cost.with_exchange(self._exchanges[index])
        seconds = seconds_at_link_share(cost, load, len(self._groups[index]), share)
        return seconds / float(self._pace[index])

    def split(self, times: TaskTimes) -> RankTime:
        """Where the time of the ranks went while they had tasks."""
        degrees = np.array([len(group) for group in self._groups])
        silent = replace(self._cost, intra=_FREE, inter=_FREE)
        silent_s = seconds_on(self._counts, self._groups, self._exchanges, self._plan.cluster, silent)

        taken_s = times.end_s - times.start_s

        def total(seconds: Array) -> float:
            return float(degrees @ seconds)

        return RankTime(
            compute_s=total(silent_s),
            messages_s=total(self._model_s - silent_s),
            sharing_s=max(0.0, total(taken_s - self._alone_s)) if self._conditions.shares else 0.0,
            pace_s=total(self._alone_s - self._model_s),
        )
