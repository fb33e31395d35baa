"""What a step took: passes of the model timed by hooks, the numbers of all processes, and the run folder."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexcp.core.metrics import StepReport
from flexcp.core.plan import Plan
from flexcp.core.run_folder import RunInfo, drop_later, metrics_path, trace_path
from flexcp.core.trace import Span, TraceWriter, task_detail
from flexcp.cost.correction import FACTORS, Correction
from flexcp.integrations.megatron.batches import SeqParams
from flexcp.integrations.megatron.grid import Grid
from flexcp.planner import Planner
from flexcp.planner.timeline import fill_s
from flexcp.runtime.batches import MicroBatch
from flexcp.runtime.feed import Prepared

Handed = Sequence[tuple[MicroBatch | None, SeqParams]]

_NUMBERS = 7  # of a process at the end of a step, before the durations of its tasks


def watch(model: nn.Module) -> Callable[[], None]:
    """Have a GPT model note in every task when its forward and its backward passes began and ended.

    On accelerators these are times of the host.

    Returns:
        What ends it.
    """
    hooks = [
        model.register_forward_pre_hook(_forward_begins, with_kwargs=True),
        model.register_forward_hook(_forward_ends, with_kwargs=True),
    ]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def _forward_begins(model: nn.Module, arguments: Any, options: Mapping[str, Any]) -> None:
    params = options.get("packed_seq_params")
    if isinstance(params, SeqParams):
        params.passes.append((time.perf_counter(), math.nan))


def _forward_ends(model: nn.Module, arguments: Any, options: Mapping[str, Any], output: Any) -> None:
    params = options.get("packed_seq_params")
    if isinstance(params, SeqParams):
        params.passes[-1] = params.passes[-1][0], time.perf_counter()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(_backward_begins, params))  # type: ignore[no-untyped-call]


def _backward_begins(params: SeqParams, gradient: Tensor) -> None:
    begun_s = time.perf_counter()
    # Called when the engine has nothing left to do for this backward pass, on whatever stage.
    torch.autograd.Variable._execution_engine.queue_callback(
        lambda: params.passes.append((begun_s, time.perf_counter()))
    )


class Measured:
    """The times of one step in this process.

    Args:
        plan: of the step.
        rank: of the plan, that this process belongs to.
        prepared: how long it waited for plan and data.
        begun_s: when it asked for the step.
    """

    def __init__(self, plan: Plan, rank: int, prepared: Prepared, begun_s: float) -> None:
        self._plan, self._rank, self._prepared = plan, rank, prepared
        self.begun_s = begun_s
        self.opened_s = time.perf_counter()

    def row(self, handed: Handed, ended_s: float) -> list[float]:
        """What the others must know: numbers for `report`, then seconds of the tasks in order."""
        passes = [one for _, params in handed for one in params.passes]
        first_s = min((start_s for start_s, _ in passes), default=ended_s)
        last_s = max((end_s for _, end_s in passes), default=ended_s)
        waits = [wait for _, params in handed for wait in params.context.exchange.waits]
        most = max(len(self._plan.tasks_of(rank)) for rank in range(self._plan.cluster.ranks))
        durations = [_total(params.passes) for micro, params in handed if micro is not None]
        return [
            sum(durations),
            last_s - first_s,
            self._prepared.plan_wait_s,
            self._prepared.data_wait_s,
            _total(waits),
            ended_s - last_s,
            first_s - self.begun_s,
            *durations,
            *[math.nan] * (most - len(durations)),
        ]

    def spans(self, handed: Handed, ended_s: float, step: int) -> list[Span]:
        """For the trace; times on the clock of `time.perf_counter`."""
        spans = [Span(self._rank, "gather", self.begun_s, self.opened_s, step)]
        last_s = self.opened_s
        for micro, params in handed:
            if micro is None or not params.passes:
                continue
            detail = task_detail(self._plan, micro.task, self._rank)
            detail["ring_wait_s"] = _total(params.context.exchange.waits)
            begun_s, end_s = params.passes[0][0], max(end_s for _, end_s in params.passes)
            spans.append(Span(self._rank, "task", begun_s, end_s, step, detail))
            last_s = max(last_s, end_s)
        return [*spans, Span(self._rank, "reduce", last_s, ended_s, step)]

    def report(
        self, rows: Tensor, grid: Grid, step: int, loss: float, supervised: int, grad_norm: float | None
    ) -> StepReport:
        """The step of all processes; a cell is as slow as the slowest of its processes.

        Args:
            rows: what every process gave as `row`.
            grid: which processes make up a cell.
            step: its index.
            loss: mean over the supervised tokens.
            supervised: their number.
            grad_norm: global norm, if the caller knows.
        """
        plan, by_cell = self._plan, _by_cell(rows[:, :_NUMBERS], grid)
        busy, measured, plan_wait, data_wait, ring_wait, tail, opening = by_cell.unbind(1)
        measured_s = float(measured.max())
        idle = [max(0.0, 1.0 - float(b) / measured_s) if measured_s > 0 else 0.0 for b in busy]
        exposed_s = float((plan_wait + data_wait).max())
        return StepReport(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            tokens=sum(sample.tokens for sample in plan.samples),
            supervised_tokens=supervised,
            degrees=plan.degrees,
            predicted_s=plan.step_s + fill_s(plan, grid.pipeline),
            bound_s=plan.bound_s,
            measured_s=measured_s,
            step_s=time.perf_counter() - self.begun_s,
            plan_s=self._prepared.plan_s,
            exposed_s=exposed_s,
            plan_wait_s=float(plan_wait.max()),
            data_wait_s=float(data_wait.max()),
            idle_share=sum(idle) / len(idle),
            pairs=sum(sample.attended_pairs for sample in plan.samples),
            longest_tokens=max(sample.tokens for sample in plan.samples),
            alone_s=plan.alone_s,
            predicted_idle_share=plan.idle_share,
            gather_s=max(0.0, float(opening.min()) - exposed_s),
            ring_wait_s=float(ring_wait.mean()),
            reduce_s=float(tail.min()),
            idle_shares=tuple(round(share, 4) for share in idle),
        )


def durations_of(rows: Tensor, grid: Grid) -> list[list[float]]:
    """Seconds of the tasks of every rank of the plan, in order; NaN behind the last one."""
    durations: list[list[float]] = _by_cell(rows[:, _NUMBERS:], grid).tolist()
    return durations


def _by_cell(rows: Tensor, grid: Grid) -> Tensor:
    """[N, numbers]: of the slowest process of each cell."""
    return torch.stack([rows[list(column)] for column in grid.columns]).cpu().amax(0)


def _total(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


class RunFolder:
    """The files of a run (`core.run_folder`), which `flexcp report` reads: metrics, and a trace of each rank.

    Args:
        folder: made if missing; what an earlier, longer attempt wrote from `first_step` on is dropped.
        first_step: where this attempt begins.
        grid: the first process of a cell writes for its rank.
        rank: of the plan, that this process belongs to.
        info: what runs; None on processes other than the first.
    """

    def __init__(self, folder: Path, first_step: int, grid: Grid, rank: int, info: RunInfo | None) -> None:
        self._folder, self._info = folder, info
        self._origin_s = time.perf_counter()
        if info is not None:
            folder.mkdir(parents=True, exist_ok=True)
            drop_later(folder, first_step)
            info.write(folder, first_step)
        torch.distributed.barrier()
        self._trace = TraceWriter(trace_path(folder, first_step, rank)) if grid.is_first else None

    def step(self, report: StepReport, spans: Sequence[Span], correction: Correction | None) -> None:
        """Write one step, and what has been learnt of the costs until its end."""
        if self._info is not None:
            record = report.to_record()
            if correction is not None:
                record["cost_factors"] = dict(zip(FACTORS, correction.factors, strict=True))
            with metrics_path(self._folder).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if self._trace is not None:
            for span in spans:
                times = span.start_s - self._origin_s, span.end_s - self._origin_s
                self._trace.write(Span(span.rank, span.name, *times, span.step, span.detail))
            self._trace.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None


def device_name(device: torch.device) -> str:
    """As its vendor calls it, whoever that is."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def run_info(planner: Planner, config: Any, device: torch.device) -> RunInfo:
    """What runs, as `flexcp report` names it."""
    return RunInfo(
        origin="measured",
        model=f"megatron-gpt, {config.num_layers} layers of {config.hidden_size}",
        hardware=device_name(device),
        policy=planner.policy,
        mode=planner.mode,
        cluster=planner.cluster,
        whole_below_tokens=planner.uncut_below_tokens,
        coefficients=asdict(planner.cost),
    )
