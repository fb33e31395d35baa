"""What happened step by step, where its time went, and how well it was predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexcp.report.markup import Markup, element, join
from flexcp.report.page import charts
from flexcp.report.page.limits import MOST_POINTS
from flexcp.report.page.sections.section import Section
from flexcp.report.page.subject import Curve, Subject
from flexcp.report.page.thinning import thin_curves
from flexcp.report.tables import format_seconds


def step_times(subject: Subject) -> Section:
    """Seconds a step."""
    steps, curves = thin_curves(subject.steps, subject.curves, MOST_POINTS)
    tips = [
        f"step {step}\n" + "\n".join(f"{c.name}: {format_seconds(c.values[index])}" for c in curves)
        for index, step in enumerate(steps)
    ]
    scale = charts.seconds(max(max(curve.values) for curve in curves))
    look = "Seconds a step. Look for " + (
        "the distance of each policy from the bound, which no plan can beat."
        if subject.origin == "planned"
        else f"predicted and {subject.origin} running side by side; the whole step adds data, reduction "
        "and optimizer."
    )
    return Section(
        "steps",
        "Step time",
        look + _means(subject, steps),
        join([keys(curves), charts.lines(curves, steps, scale, tips)]),
        _curve_table(steps, curves, format_seconds),
    )


def gaps(subject: Subject) -> Section:
    """Ratios to the bound and to the prediction."""
    steps, gaps = thin_curves(subject.steps, subject.gaps, MOST_POINTS)
    low = min(1.0, *(min(curve.values) for curve in gaps))
    high = max(1.05, *(max(curve.values) for curve in gaps))
    one = Curve("1", (1.0,) * len(steps), "bound")
    tips = [
        f"step {step}\n" + "\n".join(f"{curve.name}: {curve.values[index]:.3f}" for curve in gaps)
        for index, step in enumerate(steps)
    ]
    look = (
        "Step time over its bound; 1 cannot be improved. Look for steps that stand out: "
        "their batches are hard to balance."
        if subject.origin == "planned"
        else "Two ratios that are 1 at best: what planning left on the table (predicted / bound), and how "
        "far times are from their prediction."
    )
    drawing = charts.lines((one, *gaps), steps, charts.linear(low, high, "ratio"), tips)
    return Section(
        "gap",
        "Gap",
        look + _means(subject, steps),
        join([keys(gaps), drawing]),
        _curve_table(steps, gaps, "{:.3f}".format),
    )


def _means(subject: Subject, steps: Sequence[int]) -> str:
    if len(steps) == len(subject.steps):
        return ""
    return f" Points are means of neighbouring steps, {len(steps)} of {len(subject.steps):,} steps."


def keys(curves: Sequence[Curve]) -> Markup:
    """Lines are told apart by their dashes too."""
    spans = [
        element(
            "span",
            element(
                "svg",
                element("path", class_=f"line {curve.style}", d="M0 5H26"),
                width=26,
                height=10,
                aria_hidden="true",
            ),
            curve.name,
            class_="key",
        )
        for curve in curves
    ]
    return element("p", spans, class_="legend")


def _curve_table(
    steps: Sequence[int], curves: Sequence[Curve], form: Callable[[float], str]
) -> tuple[list[str], list[list[str]]]:
    return (
        ["step", *(curve.name for curve in curves)],
        [[f"{step}", *(form(curve.values[index]) for curve in curves)] for index, step in enumerate(steps)],
    )


def parts(subject: Subject) -> Section:
    """Shares of the time of a step."""
    names, shares = list(subject.parts), [100 * share for share in subject.parts.values()]
    texts = [f"{share:.1f} %" for share in shares]
    tips = [f"{name}\n{text} of the time" for name, text in zip(names, texts, strict=True)]
    scale = charts.linear(0.0, max(shares), "share, %")
    look = (
        "Shares of the time of a step, mean of the ranks and of the steps after the first. Look for anything "
        "beside compute: waits for plan, data or messages, idle ranks, and what any step costs."
    )
    drawing = charts.bars(names, [("main", shares)], scale, tips, title="")
    table = (["part", "share"], list(zip(names, texts, strict=True)))
    return Section("parts", "Where the time went", look, drawing, table)


def prediction(subject: Subject) -> Section:
    """One dot a task."""
    tips = [
        (
            before,
            after,
            f"{word}\npredicted {format_seconds(before)}\n{subject.origin} {format_seconds(after)}",
        )
        for before, after, word in subject.pairs
    ]
    look = (
        "One dot a task. On the dashed line prediction is right; above it the task took longer. "
        "A cloud along a parallel line is a machine slower than its calibration, a bend is a wrong formula."
    )
    return Section(
        "prediction",
        f"Tasks: predicted and {subject.origin}",
        look,
        element("div", charts.dots(tips, ("predicted", subject.origin)), class_="square"),
    )
