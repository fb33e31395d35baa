"""From a run folder, measured or simulated, to what a page shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flexcp.core.errors import InputError
from flexcp.core.jsonl import ends_whole
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Plan
from flexcp.core.run_folder import Attempt, RunInfo, metrics_path, read_attempts, read_info, read_reports
from flexcp.planner.outcome import Outcome
from flexcp.report.advice import Figures, advice, figures_of
from flexcp.report.page.comparison import PlannedStep, compare_policies
from flexcp.report.page.limits import MOST_DOTS, MOST_RANK_FILES, MOST_ROWS, MOST_STEPS
from flexcp.report.page.spans import SeenStep, Traces, read_traces
from flexcp.report.page.subject import (
    Box,
    Curve,
    DegreeShare,
    Panel,
    Subject,
    Timeline,
    TokensHeld,
    choose_steps,
    no_such_step,
    plan_of,
    spread,
)
from flexcp.report.scales import shown_ranks
from flexcp.report.summary import format_share
from flexcp.report.tables import format_seconds


def subject_of_run(folder: Path, step: int | None = None) -> Subject:
    """Everything to show of a run; `step` is to have a timeline.

    Raises:
        InputError: not a run folder, damaged, or without that step, or without any.
    """
    info = read_info(folder)
    reports = reports_of(folder)
    chosen = _chosen(reports, step)
    attempts = _attempts(folder, info)
    traces = read_traces(folder, attempts, set(chosen))
    timelines = tuple(
        _timeline(_attempt_of(attempts, report.step).info, traces.steps[report.step], report)
        for report in reports
        if report.step in chosen and traces.steps[report.step].tasks
    )
    policies, why_not = _compared(info, attempts, traces, timelines, reports)
    figures = figures_of(reports)
    todo = advice(figures, info)
    notices = [*traces.notices, *_notices(folder, attempts, reports, chosen), *why_not]
    return Subject(
        title=folder.resolve().name,
        subtitle=f"{info.model} on {info.cluster.ranks:,} × {info.hardware}",
        origin=info.origin,
        verdict=_verdict(info, figures, later=len(reports) > 1),
        advice=todo,
        good=not todo,
        facts=_facts(info, reports, figures),
        notices=tuple(notices),
        steps=tuple(report.step for report in reports),
        # The first step of a run is warming up.
        focus=step if step is not None else chosen[min(1, len(chosen) - 1)],
        curves=_curves(info, reports),
        gaps=_gaps(info, reports),
        timelines=timelines,
        lengths=traces.lengths.counted(),
        degrees=_degrees(reports, traces),
        memory=_held(info, traces),
        policies=policies,
        baseline="static" if any(row.policy == "static" and not row.refusal for row in policies) else "",
        policy=info.policy,
        pairs=_pairs(timelines),
        parts=figures.parts,
        figures=figures,
    )


def _chosen(reports: Sequence[StepReport], step: int | None) -> list[int]:
    """Steps with a timeline, ascending."""
    numbers = [report.step for report in reports]
    if step is not None and step not in numbers:
        raise no_such_step(step, numbers)
    also = numbers.index(step) if step is not None else None
    times_s = [report.step_s for report in reports]
    return [numbers[index] for index in choose_steps(times_s, MOST_STEPS, also)]


def _attempts(folder: Path, info: RunInfo) -> tuple[Attempt, ...]:
    """All attempts; the newest is what the run's own file says."""
    *earlier, newest = read_attempts(folder)
    return (*earlier, replace(newest, info=info))


def _attempt_of(attempts: Sequence[Attempt], step: int) -> Attempt:
    """The attempt that a step is of; the first, where its own left no traces."""
    return next((attempt for attempt in attempts if attempt.covers(step)), attempts[0])


def _compared(
    info: RunInfo,
    attempts: Sequence[Attempt],
    traces: Traces,
    timelines: Sequence[Timeline],
    reports: Sequence[StepReport],
) -> tuple[tuple[Outcome, ...], tuple[str, ...]]:
    """Policies on the steps of the timelines of which all is known."""
    factors = {report.step: report.plan_factors for report in reports}
    known = [
        PlannedStep(
            tuple(sample for box in timeline.panels[0].boxes for sample in box.pack),
            _attempt_of(attempts, timeline.step).info,
            factors[timeline.step],
        )
        for timeline in timelines
        if traces.steps[timeline.step].whole
    ]
    rows, why_not = compare_policies(info, known)
    if rows and len(known) < len(timelines):
        few = f"Policies are compared on {len(known)} of {len(timelines)} steps: of the others, traces lack."
        return rows, (few,)
    return rows, why_not


def _held(info: RunInfo, traces: Traces) -> TokensHeld:
    ranks = tuple(sorted(traces.peak_rows))
    return TokensHeld(ranks, tuple(traces.peak_rows[rank] for rank in ranks), info.cluster.tokens_per_rank)


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


def _timeline(info: RunInfo, seen: SeenStep, report: StepReport) -> Timeline:
    origin_s = min(start for task in seen.tasks for start, _ in task.by_rank.values())
    shown = set(shown_ranks(info.cluster.ranks, MOST_ROWS))
    predicted, measured = [], []
    for key, task in enumerate(sorted(seen.tasks, key=lambda t: (t.predicted_start_s, min(t.by_rank)))):
        ranks = tuple(sorted(task.by_rank))
        same = (key, task.degree, ranks, task.pack)
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
    panels = (Panel("predicted", tuple(predicted)), Panel(info.origin, tuple(measured), marks))
    plans = tuple(_plan(info, panel, report.bound_s) for panel in panels) if _known(seen) else ()
    return Timeline(report.step, panels, report.bound_s, info.cluster, plans)


def _known(seen: SeenStep) -> bool:
    """Whether all of the step was read; files that are there may still end early."""
    return seen.whole and all(len(task.by_rank) == task.degree for task in seen.tasks)


def _plan(info: RunInfo, panel: Panel, bound_s: float) -> Plan:
    whole_below = info.whole_below_tokens
    return plan_of(panel, bound_s, mode=info.mode, cluster=info.cluster, whole_below_tokens=whole_below)


def _pairs(timelines: Sequence[Timeline]) -> tuple[tuple[float, float, str], ...]:
    pairs = []
    for timeline in timelines:
        predicted, measured = timeline.panels
        for before, after in zip(predicted.boxes, measured.boxes, strict=True):
            tokens = sum(sample.tokens for sample in before.pack)
            word = f"step {timeline.step}, {tokens:,} tokens on {before.degree}"
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


def _verdict(info: RunInfo, figures: Figures, *, later: bool) -> str:
    """What a colleague should hear first; all of it, as all figures, of the steps after the first."""
    ratio = figures.measured_s / figures.predicted_s
    slower = "as predicted" if abs(ratio - 1) < 0.005 else f"{ratio:.2f}× the predicted"
    when = "After the first step, " if later else ""
    return (
        f"{when}{info.policy} plans {figures.gap - 1:.1%} above the bound, and"
        f" {info.origin} step times are {slower} (a step is off by {figures.error:.1%} on average). "
        f"Ranks are without a task for {figures.idle:.1%} of the time; "
        f"{figures.waited:.1%} is spent waiting for plans and data."
    )


def _facts(info: RunInfo, reports: Sequence[StepReport], figures: Figures) -> tuple[tuple[str, str], ...]:
    return (
        ("a step", format_seconds(figures.step_s)),
        ("prediction off by", f"{figures.error:.1%}"),
        ("above the bound", f"{figures.gap - 1:.1%}"),
        ("idle", f"{figures.idle:.1%}"),
        ("tokens/s", f"{figures.tokens_per_s:,.0f}"),
        *([] if figures.mfu is None else [("MFU", format_share(figures.mfu, 1))]),
        *_losses(reports),
        ("steps", f"{reports[0].step} to {reports[-1].step}"),
        ("policy", info.policy),
        ("model", info.model),
        ("hardware", f"{info.cluster.ranks:,} × {info.hardware}"),
        ("ranks a node", f"{info.cluster.ranks_per_node}"),
        ("tokens a rank", f"{info.cluster.tokens_per_rank:,}"),
        ("mode", info.mode),
        ("planning, mean", f"{1e3 * figures.plan_s:.0f} ms"),
    )


def _losses(reports: Sequence[StepReport]) -> tuple[tuple[str, str], ...]:
    """First and last; nothing of a simulated run, which has none."""
    losses = [report.loss for report in reports if report.loss is not None]
    return (("loss", f"{losses[0]:.2f} → {losses[-1]:.2f}"),) if losses else ()


def _notices(
    folder: Path, attempts: Sequence[Attempt], reports: Sequence[StepReport], chosen: Sequence[int]
) -> list[str]:
    notices = []
    if not ends_whole(metrics_path(folder)):
        notices.append("metrics.jsonl ends inside a line: the run was killed, or the file was cut.")
    if skipped := [str(report.step) for report in reports if report.skipped]:
        notices.append(
            f"{len(skipped)} steps were skipped, their loss or gradient not finite: {', '.join(skipped[:20])}"
            + (", …" if len(skipped) > 20 else ".")
        )
    clusters = [attempt.info.cluster for attempt in attempts]
    if len({(cluster.ranks, cluster.tokens_per_rank) for cluster in clusters}) > 1:
        notices.append("The run went on with other ranks: " + "; ".join(map(_attempt_words, attempts)) + ".")
    ranks = max(cluster.ranks for cluster in clusters)
    rows, read = shown_ranks(ranks, MOST_ROWS), shown_ranks(ranks, MOST_RANK_FILES)
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


def _attempt_words(attempt: Attempt) -> str:
    cluster = attempt.info.cluster
    return f"from step {attempt.first_step}, {cluster.ranks:,} × {cluster.tokens_per_rank:,} tokens"
