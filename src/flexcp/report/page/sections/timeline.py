"""Ranks × time of a few steps, one of which shows."""

from __future__ import annotations

from flexcp.report.markup import Markup, element, join
from flexcp.report.page import gantt
from flexcp.report.page.sections.section import Section
from flexcp.report.page.subject import Subject, Timeline


def timeline(subject: Subject) -> Section:
    """All timelines, with what chooses and widens them."""
    planned = subject.origin == "planned"
    lines = subject.timelines
    first = next((line.step for line in lines if line.step == subject.focus), lines[0].step)
    degrees = [box.degree for line in lines for panel in line.panels for box in panel.boxes]
    other = "the policy it is compared with" if planned else f"what was {subject.origin}"
    look = (
        "Each box is a pack of samples on the ranks that share it, as wide as its time. "
        f"Above is the plan, below {other}, on one axis of time. "
        "Look for idle ground on the right, where ranks wait for others"
        + (", and for boxes that outgrew their prediction." if not planned else ".")
    )
    steps = [_step(line, pairs=not planned, hidden=line.step != first) for line in lines]
    drawing = join([_controls(lines, first), gantt.legend(degrees, marks=not planned), *steps])
    return Section("timeline", "Timeline: ranks × time", look, drawing)


def _controls(lines: tuple[Timeline, ...], first: int) -> Markup:
    options = [
        element("option", f"{line.step}", value=f"{line.step}", selected=line.step == first) for line in lines
    ]
    return element(
        "div",
        element("label", "Step ", element("select", options, id="step")),
        element("button", "–", id="out", type="button", aria_label="Zoom out"),
        element("button", "+", id="in", type="button", aria_label="Zoom in"),
        element("span", "hover a box, or tab into the plot and use the arrow keys", class_="hint"),
        class_="controls",
    )


def _step(line: Timeline, *, pairs: bool, hidden: bool) -> Markup:
    """One step; `pairs`: both panels hold the same tasks."""
    drawn = gantt.draw(line)
    return element(
        "div",
        element("p", drawn.notice, class_="notice") if drawn.notice else "",
        element("div", drawn.labels, element("div", drawn.plot, class_="scroller"), class_="chart"),
        class_="step",
        data_step=line.step,
        data_pairs=pairs,
        hidden=hidden,
    )
