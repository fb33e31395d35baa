"""Run folders of any size without running anything: plans that go as predicted, times a factor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from flexcp.core.cluster import Cluster
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Plan
from flexcp.core.run_folder import Origin, RunInfo, metrics_path, trace_path
from flexcp.core.sample import Sample
from flexcp.core.trace import Span, TraceWriter, task_detail
from flexcp.cost.correction import Correction
from flexcp.cost.model import CostModel, Link
from flexcp.planner import make_plan

# Long, middling and short: rings of many degrees beside whole samples.
BATCHES = [
    [9000, 3100, 2600, 2000, 1500, 1400, *[300] * 6, 700, 40],
    [5000, 4000, 2500, 1900, *[100] * 8, 900, 10],
    [12000, 2100, 2050, 60, 60, 60, 80, *[500] * 9],
]
COST = CostModel(2e-8, 1e-5, 1e-4, 1e-3, 8e-3, 4096.0, 4, Link(1e10, 1e-5), Link(1e9, 2e-5))


def write_run(
    folder: Path,
    batches: Sequence[Sequence[int | Sample]],
    cluster: Cluster,
    *,
    slower: float = 1.0,
    origin: Origin = "measured",
    model: str = "tiny",
    first_step: int = 0,
    factors: Sequence[tuple[float, ...]] = (),
) -> list[Plan]:
    """Write a run of one step a batch, every task `slower` times its prediction; its plans.

    With `first_step` it goes on with what is there, as an attempt of its own. `factors` are what was learnt
    of the costs before each step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plans = []
    first = 0
    for number, batch in enumerate(batches):
        samples = [s if isinstance(s, Sample) else Sample(first + i, s) for i, s in enumerate(batch)]
        cost = Correction(factors[number]).apply(COST) if factors else COST
        plans.append(make_plan(samples, cluster, cost))
        first += len(batch)
    info = RunInfo(
        origin=origin,
        model=model,
        hardware="cpu",
        policy="flexcp",
        mode="free-running",
        cluster=cluster,
        whole_below_tokens=plans[0].whole_below_tokens,
        coefficients=asdict(COST),
    )
    info.write(folder, first_step)
    with metrics_path(folder).open("a" if first_step else "w", encoding="utf-8") as file:
        for number, plan in enumerate(plans):
            report = report_of(plan, first_step + number, slower)
            file.write(_json(replace(report, plan_factors=factors[number] if factors else ())))
    for rank in range(cluster.ranks):
        with TraceWriter(trace_path(folder, first_step, rank)) as trace:
            write_rank(trace, rank, plans, slower, first_step)
    return plans


def report_of(plan: Plan, step: int, slower: float) -> StepReport:
    """What a step of such a run reports."""
    tokens = sum(sample.tokens for sample in plan.samples)
    return StepReport(
        step=step,
        loss=8.0 - step,
        grad_norm=1.0,
        tokens=tokens,
        supervised_tokens=tokens,
        degrees=plan.degrees,
        predicted_s=plan.step_s,
        bound_s=plan.bound_s,
        measured_s=plan.step_s * slower,
        step_s=plan.step_s * slower + 0.01,
        plan_s=0.002,
        exposed_s=0.0,
        idle_share=plan.idle_share,
    )


def write_rank(trace: TraceWriter, rank: int, plans: list[Plan], slower: float, first_step: int = 0) -> None:
    """The spans of one rank: its tasks and, after each step, the reduction."""
    origin_s = 0.0
    for step, plan in enumerate(plans, first_step):
        for index in plan.tasks_of(rank):
            task = plan.tasks[index]
            start_s, end_s = origin_s + slower * task.start_s, origin_s + slower * task.end_s
            trace.write(Span(rank, "task", start_s, end_s, step, task_detail(plan, task, rank)))
        origin_s += slower * plan.step_s
        trace.write(Span(rank, "reduce", origin_s, origin_s + 0.01, step))
        origin_s += 0.02


def _json(report: StepReport) -> str:
    return json.dumps({**report.to_record(), "lr": 0.1}) + "\n"
