"""A run of many steps: what happens around the tasks of a step, and the records a real run would write.

A step opens when its data, the plan of the step after it and, the first one, its own plan are there
(`runtime.engine` runs one step ahead). It runs its tasks, reduces gradients and steps the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import RankFailedError
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Plan
from flexcp.core.trace import Span
from flexcp.cost.model import CostModel
from flexcp.simulate.conditions import Conditions, Failure
from flexcp.simulate.costs import StepCosts
from flexcp.simulate.reduction import reduction_end_s
from flexcp.simulate.spans import StepTimes, spans
from flexcp.simulate.split import RankTime
from flexcp.simulate.tasks import TaskTimes, WaveCollectives, run_tasks

Array = npt.NDArray[np.float64]
Record = Callable[[Span], object]


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What the trainer would report of a step, and where the time of its ranks went."""

    report: StepReport
    time: RankTime


def simulate(
    plans: Iterable[Plan],
    cost: CostModel,
    conditions: Conditions | None = None,
    record: Record | None = None,
) -> Iterator[SimulatedStep]:
    """Run the plans one after the other.

    With default conditions every step takes `Plan.step_s`, up to the rounding of sums, if `cost` is what the
    plans were made with.

    Args:
        plans: one a step, all for the same ranks; taken one step ahead.
        cost: what tasks really cost, each by its own exchange.
        conditions: what the plans do not know of.
        record: called with every span, as the ranks of a real run would write it.

    Raises:
        RankFailedError: the rank that `conditions` let die has died; spans up to then are recorded.
        ConfigError: `conditions` name a rank that does not exist.
        PlanError: tasks of a plan wait for each other in a circle.
    """
    run = _Run(cost, conditions or Conditions(), record)
    coming = iter(plans)
    plan = next(coming, None)
    while plan is not None:
        following = next(coming, None)
        yield run.step(plan, last=following is None)
        plan = following


class _Run:
    """What is carried from step to step: the time, and when what runs in the background will be there."""

    def __init__(self, cost: CostModel, conditions: Conditions, record: Record | None) -> None:
        self._cost, self._conditions, self._record = cost, conditions, record
        self._failure_s = conditions.failure.at_s if conditions.failure else math.inf
        self._step = 0
        self._now_s = 0.0
        # Reading needs the plan; rank 0 makes one plan after the other.
        self._data_at_s = conditions.plan_s + conditions.data_s
        self._next_plan_at_s = 2 * conditions.plan_s

    def step(self, plan: Plan, *, last: bool) -> SimulatedStep:
        """One step; no plan follows on the last one, so none is waited for."""
        self._conditions.require_fitting(plan.cluster, plan.mode)
        costs = StepCosts(plan, self._step, self._cost, self._conditions)
        times = self._times(plan, costs, last=last)
        if self._record is not None:
            for span in spans(plan, self._step, times, self._failure_s):
                self._record(span)
        end_s = times.opened_s + times.end_s
        if self._conditions.failure is not None and self._failure_s < end_s:
            raise _failed(self._conditions.failure, self._step)
        time = _rank_time(plan, costs, times)
        report = _report(plan, self._step, times, time, self._conditions.plan_s)
        self._now_s = end_s
        self._data_at_s = times.opened_s + self._conditions.data_s
        self._next_plan_at_s = times.opened_s + self._conditions.plan_s
        self._step += 1
        return SimulatedStep(report, time)

    def _times(self, plan: Plan, costs: StepCosts, *, last: bool) -> StepTimes:
        conditions = self._conditions
        next_plan_at_s = 0.0 if last else self._next_plan_at_s
        opened_s = max(self._now_s, self._data_at_s, next_plan_at_s)
        awaited = "plan" if next_plan_at_s > self._data_at_s else "data"
        collectives = WaveCollectives(conditions.wave_s, conditions.reduce_overlap)
        tasks = run_tasks(plan, costs.seconds, costs.sharing(), self._failure_s - opened_s, collectives)
        last_end_s, backward_s = _last_tasks(plan, tasks, self._cost.passes)
        reduced_s = math.inf
        if np.isfinite(last_end_s).all():
            layers, overlap = self._cost.layers, conditions.reduce_overlap
            reduced_s = reduction_end_s(last_end_s, backward_s, conditions.reduce_s, layers, overlap=overlap)
            if tasks.gathers:
                reduced_s = max(reduced_s, tasks.closed_s + conditions.reduce_s)
        end_s = reduced_s + conditions.optimizer_s
        return StepTimes(self._now_s, opened_s, awaited, tasks, last_end_s, reduced_s, end_s)


def _last_tasks(plan: Plan, times: TaskTimes, passes: int) -> tuple[Array, Array]:
    """End of the last task of every rank, and how long its backward took: all passes but the forward.

    A backward costs twice a forward, and recomputation one forward more.
    """
    last = np.array([(plan.tasks_of(rank) or (-1,))[-1] for rank in range(plan.cluster.ranks)])
    end_s = np.where(last < 0, 0.0, times.end_s[last])
    start_s = np.where(np.isfinite(end_s), times.start_s[last], 0.0)
    backward_s = np.where(last < 0, 0.0, (end_s - start_s) * passes / (passes + 1))
    return end_s, backward_s


def _rank_time(plan: Plan, costs: StepCosts, times: StepTimes) -> RankTime:
    ranks, tasks = plan.cluster.ranks, times.tasks
    degrees = np.array([task.degree for task in plan.tasks])
    busy_s = float(degrees @ (tasks.end_s - tasks.start_s))
    return replace(
        costs.split(tasks),
        idle_s=max(0.0, ranks * tasks.tasks_s - busy_s),
        gather_s=ranks * tasks.gathered_s,
        reduce_s=ranks * (times.reduced_s - tasks.closed_s),
        optimizer_s=ranks * (times.end_s - times.reduced_s),
        wait_s=ranks * (times.opened_s - times.begun_s),
    )


def _report(plan: Plan, step: int, times: StepTimes, time: RankTime, plan_s: float) -> StepReport:
    tokens = sum(sample.tokens for sample in plan.samples)
    measured_s, exposed_s = times.tasks.tasks_s, times.opened_s - times.begun_s
    ranks = plan.cluster.ranks
    return StepReport(
        step=step,
        loss=None,
        grad_norm=None,
        tokens=tokens,
        supervised_tokens=tokens - len(plan.samples),  # the last token of a sample has no label
        degrees=plan.degrees,
        predicted_s=plan.step_s,
        bound_s=plan.bound_s,
        measured_s=measured_s,
        step_s=exposed_s + times.end_s,
        plan_s=plan_s,
        exposed_s=exposed_s,
        idle_share=time.idle_s / (measured_s * ranks),
        plan_wait_s=exposed_s if times.awaited == "plan" else 0.0,
        data_wait_s=exposed_s if times.awaited == "data" else 0.0,
        pairs=sum(sample.attended_pairs for sample in plan.samples),
        longest_tokens=max(sample.tokens for sample in plan.samples),
        alone_s=plan.alone_s,
        predicted_idle_share=plan.idle_share,
        gather_s=time.gather_s / ranks,
        ring_wait_s=time.messages_s / ranks,
        reduce_s=time.reduce_s / ranks,
        optimizer_s=time.optimizer_s / ranks,
        idle_shares=_idle_shares(plan, times.tasks, measured_s),
    )


def _idle_shares(plan: Plan, times: TaskTimes, makespan_s: float) -> tuple[float, ...]:
    """Of each rank, until the last task ends."""
    busy_s = np.zeros(plan.cluster.ranks)
    for task, seconds in zip(plan.tasks, times.end_s - times.start_s, strict=True):
        busy_s[list(task.ranks)] += seconds
    return tuple(np.round(np.maximum(0.0, 1.0 - busy_s / makespan_s), 4).tolist())


def _failed(failure: Failure, step: int) -> RankFailedError:
    return RankFailedError(
        f"rank {failure.rank} failed {failure.at_s:g} s into the simulated run, in step {step}",
        "A real run ends here on all ranks; flexcp train --resume goes on from its newest checkpoint.",
    )
