"""Another run beside this one: its step times on one plot, and all figures of both."""

from __future__ import annotations

from flexcp.report.markup import element, join
from flexcp.report.page import charts
from flexcp.report.page.limits import MOST_POINTS
from flexcp.report.page.sections.curves import keys
from flexcp.report.page.sections.section import Section, table
from flexcp.report.page.subject import Beside, Subject
from flexcp.report.page.thinning import thin_curves
from flexcp.report.tables import format_seconds


def beside(subject: Subject, other: Beside) -> Section:
    """The table first, for it is what one asks for; the curves of the steps that both have."""
    heads = ["", subject.title, other.title, "second to first"]
    drawing = [element("div", table(heads, other.rows), class_="scroll")]
    if other.steps:
        steps, curves = thin_curves(other.steps, other.curves, MOST_POINTS)
        tips = [
            f"step {step}\n" + "\n".join(f"{c.name}: {format_seconds(c.values[index])}" for c in curves)
            for index, step in enumerate(steps)
        ]
        scale = charts.seconds(max(max(curve.values) for curve in curves))
        drawing += [keys(curves), charts.lines(curves, steps, scale, tips)]
    look = f"{other.verdict} Figures are means over the steps after the first of each run."
    return Section("beside", f"Beside {other.title}", look, join(drawing))
