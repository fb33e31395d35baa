"""The spans of one simulated step, as the ranks of a real run would write them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexcp.core.plan import Plan
from flexcp.core.trace import Span, task_detail
from flexcp.simulate.tasks import TaskTimes

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the parts of a step were; infinite where the run never came to them.

    Attributes:
        begun_s, opened_s: in seconds of the run; in between ranks wait for `awaited`, `plan` or `data`.
        tasks: from the opening.
        last_end_s: end of the last task of each rank, from the opening; 0 where it has none.
        reduced_s, end_s: end of the reduction and of the optimizer step, from the opening.
    """

    begun_s: float
    opened_s: float
    awaited: str
    tasks: TaskTimes
    last_end_s: Array
    reduced_s: float
    end_s: float


def spans(plan: Plan, step: int, times: StepTimes, until_s: float = math.inf) -> Iterator[Span]:
    """All spans of a step, those of one rank in the order of time; a failure at `until_s` cuts them off."""
    found = _all_spans(plan, step, times)
    for span in sorted(found, key=lambda span: span.start_s) if times.tasks.gathers else found:
        if span.start_s < min(span.end_s, until_s):
            yield replace(span, end_s=min(span.end_s, until_s))


def _all_spans(plan: Plan, step: int, times: StepTimes) -> Iterator[Span]:
    ranks, opened_s = range(plan.cluster.ranks), times.opened_s
    for rank in ranks:
        yield Span(rank, times.awaited, times.begun_s, opened_s, step)
    starts, ends = times.tasks.start_s.tolist(), times.tasks.end_s.tolist()
    for task, start_s, end_s in zip(plan.tasks, starts, ends, strict=True):
        for rank in task.ranks:
            detail = task_detail(plan, task, rank)
            yield Span(rank, "task", opened_s + start_s, opened_s + end_s, step, detail)
    for from_s, to_s in times.tasks.gathers:
        for rank in ranks:
            yield Span(rank, "gather", opened_s + from_s, opened_s + to_s, step)
    reduced_s, end_s = opened_s + times.reduced_s, opened_s + times.end_s
    for rank, last_end_s in zip(ranks, times.last_end_s.tolist(), strict=True):
        begun_s = times.tasks.closed_s if times.tasks.gathers else last_end_s
        yield Span(rank, "reduce", opened_s + begun_s, reduced_s, step)
        yield Span(rank, "optimizer", reduced_s, end_s, step)
