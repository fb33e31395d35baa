"""What the steps of a run came to, and the advice that follows: values in, sentences out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import RunInfo

# Shares of the time from which a sentence is worth reading.
_IDLE = 0.10
_RING_WAIT = 0.10
_FIXED = 0.25  # gathering weights, reducing gradients and the optimizer: the same for a batch of any size
_LATE = 0.02  # plan or data, each

_TRUSTED = 0.10  # predictions that are off by less call for nothing
_ALONE = 0.95  # of the planned step: a sample that takes as long decides its time
_BUSIER = 0.5  # a rank whose idle share is less than so much of the next least is busier than all others


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the steps of a run; the first is left out where there are more, as it is warming up.

    Attributes:
        step_s: wall time of a step.
        parts: share of it by part, in the order of a step; see `StepReport.parts_s`.
        predicted_s, bound_s, measured_s: time of the tasks of a step; planned, at least, real.
        error: mean of |measured / predicted - 1| over the steps.
        predicted_idle, idle: share of rank-time without a task until the last one ends.
        idle_shares: `idle` of each rank; empty where it is not known.
        alone: share of the steps that take as long as one sample by itself.
        longest_tokens: of the longest sample.
        tokens_per_rank: tokens of a step for each rank, 0 where ranks are not known.
        tokens_per_s: of all ranks.
        plan_s: time to plan a step, hidden or not.
        mfu: model FLOPs utilization; None where it is not known.
    """

    step_s: float
    parts: dict[str, float]
    predicted_s: float
    bound_s: float
    measured_s: float
    error: float
    predicted_idle: float
    idle: float
    idle_shares: tuple[float, ...]
    alone: float
    longest_tokens: int
    tokens_per_rank: float
    tokens_per_s: float
    plan_s: float
    mfu: float | None

    @property
    def gap(self) -> float:
        """Planned time over its bound, all steps together."""
        return self.predicted_s / self.bound_s

    @property
    def waited(self) -> float:
        """Share of the time in which steps wait for their plan and their data."""
        return self.parts["plan"] + self.parts["data"]


def figures_of(reports: Sequence[StepReport]) -> Figures:
    """Of at least one step."""
    warm = reports[1:] or reports
    steps_s = sum(report.step_s for report in warm)
    parts = [report.parts_s for report in warm]
    ranks = len(warm[-1].idle_shares)
    by_rank = [report.idle_shares for report in warm if len(report.idle_shares) == ranks]
    mfu = [(report.mfu, report.step_s) for report in warm if report.mfu is not None]
    return Figures(
        step_s=steps_s / len(warm),
        parts={name: sum(part[name] for part in parts) / steps_s for name in parts[0]},
        predicted_s=fmean(report.predicted_s for report in warm),
        bound_s=fmean(report.bound_s for report in warm),
        measured_s=fmean(report.measured_s for report in warm),
        error=fmean(abs(report.measured_s / report.predicted_s - 1.0) for report in warm),
        predicted_idle=fmean(report.predicted_idle_share for report in warm),
        idle=fmean(report.idle_share for report in warm),
        idle_shares=tuple(fmean(shares) for shares in zip(*by_rank, strict=True)),
        alone=fmean(report.alone_s >= _ALONE * report.predicted_s for report in warm),
        longest_tokens=max(report.longest_tokens for report in warm),
        tokens_per_rank=fmean(report.tokens for report in warm) / ranks if ranks else 0.0,
        tokens_per_s=sum(report.tokens for report in warm) / steps_s,
        plan_s=fmean(report.plan_s for report in warm),
        mfu=sum(m * s for m, s in mfu) / sum(s for _, s in mfu) if mfu else None,
    )


def advice(figures: Figures, info: RunInfo) -> tuple[str, ...]:
    """What to do about a run, predictions first, then by what is lost; nothing where all is well."""
    found = [
        *_on_predictions(figures, info),
        *_on_idle_ranks(figures),
        *_on_batch(figures),
        *_on_messages(figures, info),
        *_on_waiting(figures),
    ]
    return tuple(text for _, text in sorted(found, key=lambda pair: -pair[0]))


_Found = list[tuple[float, str]]  # share of the time that is at stake, and what to do


def _on_predictions(figures: Figures, info: RunInfo) -> _Found:
    if figures.error <= _TRUSTED or info.origin != "measured":
        return []
    off = f"Predicted times of tasks are off by {figures.error:.0%}, too far to plan by."
    if info.hardware.endswith(".json"):
        remedy = "The machine is not as it was when it was profiled: run flexcp profile again beside nothing"
        remedy += " else, with lengths like these."
    else:
        remedy = "Measure this machine with flexcp profile --out machine.json, then set "
        remedy += 'parallel.hardware = "machine.json". Beside other work no prediction holds, nor what is '
        remedy += "learnt: run where the cores are free."
    return [(1.0, f"{off} {remedy}")]  # first: plans follow predictions, so all else may follow from it


def _on_idle_ranks(figures: Figures) -> _Found:
    if figures.idle <= _IDLE:
        return []
    without = f"Ranks are without a task for {figures.idle:.0%} of the time"
    if figures.alone > 0.5:
        text = (
            f"{without}, as one sample takes as long as the step in {figures.alone:.0%} of the steps "
            f"(the longest has {figures.longest_tokens:,} tokens). A larger run.global_batch gives the "
            'other ranks work meanwhile; data.max_tokens and data.too_long = "skip" leave such samples out.'
        )
    elif figures.predicted_idle > _IDLE:
        text = (
            f"{without}, and the plans know it ({figures.predicted_idle:.0%}): these samples do not fill the "
            "ranks evenly. Raise run.global_batch, or use fewer ranks."
        )
    elif (rank := _busiest(figures.idle_shares)) is not None:
        text = (
            f"{without}, rank {rank} for {figures.idle_shares[rank]:.0%}: the others wait for it. Is it "
            "slower, or does something else run there?"
        )
    else:
        text = (
            f"{without}, the plans foresaw {figures.predicted_idle:.0%}. The timeline of flexcp report shows "
            "for whom: look for the boxes that end last."
        )
    return [(figures.idle, text)]


def _busiest(idle_shares: Sequence[float]) -> int | None:
    """The rank that is far less idle than any other, if there is one."""
    if len(idle_shares) < 2:
        return None
    rank = min(range(len(idle_shares)), key=lambda r: idle_shares[r])
    following = min(share for r, share in enumerate(idle_shares) if r != rank)
    return rank if idle_shares[rank] < _BUSIER * following else None


def _on_batch(figures: Figures) -> _Found:
    fixed = sum(figures.parts[name] for name in ("gather", "reduce", "optimizer"))
    if fixed <= _FIXED:
        return []
    tokens = f" for {figures.tokens_per_rank:,.0f} tokens a rank" if figures.tokens_per_rank else ""
    text = (
        f"Gathering weights, reducing gradients and the optimizer take {fixed:.0%} of the time{tokens}, and "
        "would take no longer for more. Raise run.global_batch, or use fewer ranks."
    )
    return [(fixed, text)]


def _on_messages(figures: Figures, info: RunInfo) -> _Found:
    share = figures.parts["ring wait"]
    if share <= _RING_WAIT:
        return []
    text = (
        f"Ranks wait for messages of their group for {share:.0%} of the time. Fewer samples are cut where a "
        f"rank holds more than {info.cluster.tokens_per_rank:,} tokens (parallel.tokens_per_rank); and links "
        "slower than the plans think are found by flexcp profile."
    )
    return [(share, text)]


def _on_waiting(figures: Figures) -> _Found:
    plan, data = figures.parts["plan"], figures.parts["data"]
    found = []
    if plan > _LATE:
        text = f"Steps wait for their plan for {plan:.0%} of the time. Leave rank 0 a core for planning."
        found.append((plan, text))
    if data > _LATE:
        text = (
            f"Steps wait for their data for {data:.0%} of the time. Put them on a faster disk, or leave "
            "every rank a core for reading."
        )
        found.append((data, text))
    return found
