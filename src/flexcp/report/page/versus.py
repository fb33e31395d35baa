"""Two runs side by side: their figures, and by how much the second differs from the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flexcp.core.errors import InputError
from flexcp.report.advice import Figures
from flexcp.report.page.subject import Beside, Curve, Subject
from flexcp.report.summary import format_share
from flexcp.report.tables import format_seconds

_Row = tuple[str, str, str, str]


def compared(this: Subject, other: Subject) -> Subject:
    """A run with another one beside it.

    Args:
        this: the run of the page.
        other: the other; both measured or simulated.

    Raises:
        InputError: one is a plan.
    """
    ours, theirs = this.figures, other.figures
    if ours is None or theirs is None:
        raise InputError("a plan cannot be compared with a run", "Give two runs; flexcp simulate runs plans.")
    speed = theirs.tokens_per_s / ours.tokens_per_s
    how = "as fast as" if abs(speed - 1) < 0.005 else f"{speed:.2f}× the speed of"
    verdict = (
        f"{other.title} is {how} {this.title}: {theirs.tokens_per_s:,.0f} tokens/s to "
        f"{ours.tokens_per_s:,.0f}, {format_seconds(theirs.step_s)} a step to {format_seconds(ours.step_s)}."
    )
    rows = (*_ratios(ours, theirs), *_shares(ours, theirs), *_settings(dict(this.facts), dict(other.facts)))
    steps = tuple(sorted(set(this.steps) & set(other.steps)))
    curves = tuple(_curve(run, style, steps) for run, style in ((this, "main"), (other, "other")))
    return replace(this, beside=Beside(other.title, verdict, rows, steps, curves))


def _curve(run: Subject, style: str, steps: Sequence[int]) -> Curve:
    """Seconds of the whole step, of some steps."""
    by_step = dict(zip(run.steps, run.curves[0].values, strict=True))
    return Curve(run.title, tuple(by_step[step] for step in steps), style)


def _ratios(ours: Figures, theirs: Figures) -> Iterator[_Row]:
    pairs = (
        ("a step", ours.step_s, theirs.step_s),
        ("tasks of a step, predicted", ours.predicted_s, theirs.predicted_s),
        ("tasks of a step, real", ours.measured_s, theirs.measured_s),
        ("bound of a step", ours.bound_s, theirs.bound_s),
    )
    a, b = ours.tokens_per_s, theirs.tokens_per_s
    yield "tokens/s", f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.3f}×"
    for name, a, b in pairs:
        yield name, format_seconds(a), format_seconds(b), f"{b / a:.3f}×" if a > 0 else "–"


def _shares(ours: Figures, theirs: Figures) -> Iterator[_Row]:
    shares = (
        ("above the bound", ours.gap - 1, theirs.gap - 1),
        ("prediction off by", ours.error, theirs.error),
        ("ranks without a task", ours.idle, theirs.idle),
        ("MFU", ours.mfu, theirs.mfu),
        *((f"time in {part}", share, theirs.parts[part]) for part, share in ours.parts.items()),
    )
    for name, a, b in shares:
        change = "–" if a is None or b is None else f"{100 * (b - a):+.1f} points"
        yield name, format_share(a, 1), format_share(b, 1), change


def _settings(here: Mapping[str, str], there: Mapping[str, str]) -> Iterator[_Row]:
    """What was set otherwise, or came out otherwise and is no time."""
    for name in ("policy", "model", "hardware", "ranks a node", "tokens a rank", "mode", "steps", "loss"):
        a, b = here.get(name, "–"), there.get(name, "–")
        if a != b:
            yield name, a, b, ""
