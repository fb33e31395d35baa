"""From a run folder, measured or simulated, to what a page shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from flexcp.core.errors import InputError
from flexcp.core.jsonl import ends_whole
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import RunInfo, metrics_path, read_info, read_reports
from flexcp.report.advice import Figures, advice, figures_of
from flexcp.report.page.comparison import compare_policies
from flexcp.report.page.limits import MOST_DOTS, MOST_RANK_FILES, MOST_STEPS, shown_ranks
from flexcp.report.page.spans import Traces, read_traces
from flexcp.report.page.subject import (
    Box,
    Curve,
    DegreeShare,
    Memory,
    Panel,
    Subject,
    Timeline,
    choose_steps,
    no_such_step,
    spread,
)
from flexcp.report.summary import format_share
from flexcp.report.tables import format_seconds


def subject_of_run(folder: Path, step: int | None = None) -> Subject:
    """Everything to show of a run; `step` is to have a timeline.

    Raises:
        InputError: not a run folder, damaged, or without that step, or without any.
    """
    info = read_info(folder)
    reports = reports_of(folder)
    numbers = [report.step for report in reports]
    if step is not None and step not in numbers:
        raise no_such_step(step, numbers)
    also = numbers.index(step) if step is not None else None
    times_s = [report.step_s for report in reports]
    chosen = [numbers[index] for index in choose_steps(times_s, MOST_STEPS, also)]
    read = shown_ranks(info.cluster.ranks, MOST_RANK_FILES)
    traces = read_traces(folder, read, set(chosen))
    bounds = {report.step: report.bound_s for report in reports}
    timelines = tuple(
        _timeline(info, traces, step, bounds[step]) for step in chosen if traces.steps[step].tasks
    )
    policies, why_not = compare_policies(info, traces, timelines)
    figures = figures_of(reports)
    todo = advice(figures, info)
    rows = shown_ranks(info.cluster.ranks)
    notices = [*traces.notices, *_notices(folder, info, reports, rows, read, chosen), *why_not]
    return Subject(
        title=folder.resolve().name,
        subtitle=f"{info.model} on {info.cluster.ranks:,} × {info.hardware}",
        origin=info.origin,
        verdict=_verdict(info, reports, figures),
        advice=todo,
        good=not todo,
        facts=_facts(info, reports, figures),
        notices=tuple(notices),
        cluster=info.cluster,
        mode=info.mode,
        whole_below_tokens=info.whole_below_tokens,
        ranks_shown=rows,
        steps=tuple(numbers),
        # The first step of a run is warming up.
        focus=step if step is not None else chosen[min(1, len(chosen) - 1)],
        curves=_curves(info, reports),
        gaps=_gaps(info, reports),
        timelines=timelines,
        lengths=traces.lengths.counted(),
        degrees=_degrees(reports, traces),
        memory=Memory(
            tuple(sorted(traces.peak_rows)),
            tuple(traces.peak_rows[rank] for rank in sorted(traces.peak_rows)),
            info.cluster.tokens_per_rank,
        ),
        policies=policies,
        baseline="static" if any(row.name == "static" and not row.refusal for row in policies) else "",
        policy=info.policy,
        pairs=_pairs(timelines),
        parts=figures.parts,
    )


def reports_of(folder: Path) -> list[StepReport]:
    """All steps of a run, the latest attempt where one was run again.

    Raises:
        InputError: there is none.
    """
    by_step = {report.step: report for report in read_reports(folder)}
    if not by_step:
        raise InputError(
            f"{metrics_path(folder)} holds no whole step",
            "Give the folder of a run that has done at least one step.",
        )
    return [by_step[step] for step in sorted(by_step)]


def _timeline(info: RunInfo, traces: Traces, step: int, bound_s: float) -> Timeline:
    seen = traces.steps[step]
    origin_s = min(start for task in seen.tasks for start, _ in task.by_rank.values())
    shown = set(shown_ranks(info.cluster.ranks))
    predicted, measured = [], []
    for key, task in enumerate(sorted(seen.tasks, key=lambda t: (t.predicted_start_s, t.samples))):
        ranks = tuple(sorted(task.by_rank))
        same = (key, task.degree, ranks, task.samples, task.tokens)
        predicted.append(
            Box(*same, task.predicted_start_s, task.predicted_start_s + task.predicted_s, task.wave)
        )
        # A ring runs from when its last rank has come.
        start_s = max(start for start, _ in task.by_rank.values())
        end_s = max(end for _, end in task.by_rank.values())
        by_rank = {r: (a - origin_s, b - origin_s) for r, (a, b) in task.by_rank.items() if r in shown}
        span_s = (start_s - origin_s, end_s - origin_s)
        measured.append(Box(*same, *span_s, task.wave, by_rank, task.ring_wait_s))
    marks = tuple(
        mark.shifted(-origin_s) for mark in seen.marks if mark.rank in shown and mark.end_s > origin_s
    )
    return Timeline(
        step, (Panel("predicted", tuple(predicted)), Panel(info.origin, tuple(measured), marks)), bound_s
    )


def _pairs(timelines: Sequence[Timeline]) -> tuple[tuple[float, float, str], ...]:
    pairs = []
    for timeline in timelines:
        predicted, measured = timeline.panels
        for before, after in zip(predicted.boxes, measured.boxes, strict=True):
            word = f"step {timeline.step}, {sum(before.tokens):,} tokens on {before.degree}"
            predicted_s, seen_s = before.end_s - before.start_s, after.end_s - after.start_s
            if predicted_s > 0 and seen_s > 0:
                pairs.append((predicted_s, seen_s, word))
    return tuple(pairs[index] for index in spread(len(pairs), MOST_DOTS))


def _curves(info: RunInfo, reports: Sequence[StepReport]) -> tuple[Curve, ...]:
    return (
        Curve("whole step", tuple(report.step_s for report in reports), "third"),
        Curve(f"tasks, {info.origin}", tuple(report.measured_s for report in reports), "other"),
        Curve("tasks, predicted", tuple(report.predicted_s for report in reports), "main"),
        Curve("bound", tuple(report.bound_s for report in reports), "bound"),
    )


def _gaps(info: RunInfo, reports: Sequence[StepReport]) -> tuple[Curve, ...]:
    return (
        Curve(f"{info.origin} / predicted", tuple(r.measured_s / r.predicted_s for r in reports), "other"),
        Curve("predicted / bound", tuple(report.gap for report in reports), "main"),
    )


def _degrees(reports: Sequence[StepReport], traces: Traces) -> tuple[DegreeShare, ...]:
    tasks: dict[int, int] = {}
    for report in reports:
        for degree, count in report.degrees.items():
            tasks[degree] = tasks.get(degree, 0) + count
    return tuple(DegreeShare(d, tasks[d], traces.rank_s.get(d, 0.0)) for d in sorted(tasks))


def _verdict(info: RunInfo, reports: Sequence[StepReport], figures: Figures) -> str:
    """What a colleague should hear first."""
    warm = reports[1:] or reports
    ratio = sum(r.measured_s for r in warm) / sum(r.predicted_s for r in warm)
    gap = sum(r.predicted_s for r in reports) / sum(r.bound_s for r in reports)
    waited = sum(r.exposed_s for r in reports) / sum(r.step_s for r in reports)
    idle = fmean(r.idle_share for r in reports)
    slower = "as predicted" if abs(ratio - 1) < 0.005 else f"{ratio:.2f}× the predicted"
    times = f"{info.origin} step times"
    when = f"After the first step, {times}" if len(reports) > 1 else times.capitalize()
    return (
        f"{info.policy} plans {gap - 1:.1%} above the bound. {when} are {slower} "
        f"(a step is off by {figures.error:.1%} on average). "
        f"Ranks are without a task for {idle:.1%} of the time; "
        f"{waited:.1%} is spent waiting for plans and data."
    )


def _facts(info: RunInfo, reports: Sequence[StepReport], figures: Figures) -> tuple[tuple[str, str], ...]:
    steps_s = sum(report.step_s for report in reports)
    return (
        ("a step", format_seconds(steps_s / len(reports))),
        ("prediction off by", f"{figures.error:.1%}"),
        (
            "above the bound",
            f"{sum(r.predicted_s for r in reports) / sum(r.bound_s for r in reports) - 1:.1%}",
        ),
        ("idle", f"{fmean(report.idle_share for report in reports):.1%}"),
        ("tokens/s", f"{sum(report.tokens for report in reports) / steps_s:,.0f}"),
        *([] if figures.mfu is None else [("MFU", format_share(figures.mfu, 1))]),
        *_losses(reports),
        ("steps", f"{reports[0].step} to {reports[-1].step}"),
        ("policy", info.policy),
        ("model", info.model),
        ("hardware", f"{info.cluster.ranks:,} × {info.hardware}"),
        ("ranks a node", f"{info.cluster.ranks_per_node}"),
        ("tokens a rank", f"{info.cluster.tokens_per_rank:,}"),
        ("mode", info.mode),
        ("planning, mean", f"{1e3 * fmean(report.plan_s for report in reports):.0f} ms"),
    )


def _losses(reports: Sequence[StepReport]) -> tuple[tuple[str, str], ...]:
    """First and last; nothing of a simulated run, which has none."""
    losses = [report.loss for report in reports if report.loss is not None]
    return (("loss", f"{losses[0]:.2f} → {losses[-1]:.2f}"),) if losses else ()


def _notices(
    folder: Path,
    info: RunInfo,
    reports: Sequence[StepReport],
    rows: Sequence[int],
    read: Sequence[int],
    chosen: Sequence[int],
) -> list[str]:
    notices = []
    if not ends_whole(metrics_path(folder)):
        notices.append("metrics.jsonl ends inside a line: the run was killed, or the file was cut.")
    if skipped := [str(report.step) for report in reports if report.skipped]:
        notices.append(
            f"{len(skipped)} steps were skipped, their loss or gradient not finite: {', '.join(skipped[:20])}"
            + (", …" if len(skipped) > 20 else ".")
        )
    ranks = info.cluster.ranks
    if len(rows) < ranks:
        notices.append(f"Timelines show every {rows[1] - rows[0]}th of {ranks:,} ranks.")
    if len(read) < ranks:
        notices.append(
            f"Lengths, shares and memory are counted on every {read[1] - read[0]}th of {ranks:,} ranks, "
            "and scaled."
        )
    if len(chosen) < len(reports):
        steps = ", ".join(map(str, chosen))
        notices.append(f"Timelines are of {len(chosen)} of {len(reports):,} steps: {steps}.")
    return notices
