"""What the tasks of one step cost on this machine and day: alone, and when they share links or cores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flexcp.core.plan import Plan
from flexcp.cost.model import CostModel, Load
from flexcp.planner.timeline import PlacedLoads
from flexcp.simulate.conditions import Conditions
from flexcp.simulate.pace import paces
from flexcp.simulate.sharing import Sharing, at_link_share
from flexcp.simulate.split import RankTime
from flexcp.simulate.tasks import TaskTimes

Array = npt.NDArray[np.float64]


class StepCosts:
    """Seconds of all tasks of one step.

    Attributes:
        seconds: of each task when it shares nothing.
    """

    def __init__(self, plan: Plan, step: int, cost: CostModel, conditions: Conditions) -> None:
        self._plan, self._cost, self._conditions = plan, cost, conditions
        self._loads = PlacedLoads.of(plan, cost)
        self._model_s = self._loads.seconds(cost)
        self._pace = paces(plan, step, conditions)
        self._alone_s = self._model_s / self._pace
        self.seconds: list[float] = self._alone_s.tolist()

    def sharing(self) -> Sharing | None:
        """What the tasks take from each other; None where there is enough of everything."""
        if not self._conditions.shares:
            return None
        uplinks, cores = self._conditions.uplinks, self._conditions.cores
        return Sharing(self._plan, self.seconds, self._seconds_at, uplinks=uplinks, cores=cores)

    def _seconds_at(self, index: int, link_share: float) -> float:
        """Of a task whose group crosses nodes with a share of the bandwidth of each link."""
        task, load = self._plan.tasks[index], Load(*self._loads.counts[index].tolist())
        cost = at_link_share(self._cost, link_share).with_exchange(task.exchange)
        return cost.task_s(load, task.degree, crosses_nodes=True) / float(self._pace[index])

    def split(self, times: TaskTimes) -> RankTime:
        """Where the time of the ranks went while they had tasks."""
        degrees = np.array([task.degree for task in self._plan.tasks])
        messages_s = self._loads.message_seconds(self._cost)
        taken_s = times.end_s - times.start_s

        def total(seconds: Array) -> float:
            return float(degrees @ seconds)

        return RankTime(
            compute_s=total(self._model_s - messages_s),
            messages_s=total(messages_s),
            sharing_s=max(0.0, total(taken_s - self._alone_s)) if self._conditions.shares else 0.0,
            pace_s=total(self._alone_s - self._model_s),
        )
