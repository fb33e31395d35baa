"""What every policy makes of the same samples."""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.planner.outcome import Outcome
from flexcp.report.markup import Markup, element, join
from flexcp.report.page import charts
from flexcp.report.page.sections.section import Section
from flexcp.report.page.subject import Subject
from flexcp.report.tables import format_degrees, format_seconds


def policies(subject: Subject) -> Section:
    """One bar a policy."""
    served = [row for row in subject.policies if not row.refusal]
    base = next((row for row in served if row.policy == subject.baseline), None)
    rows = [
        [
            row.policy,
            format_seconds(row.step_s),
            f"{row.gap:.3f}",
            f"{base.step_s / row.step_s:.2f}×" if base else "–",
            f"{row.waves:.1f}",
            f"{row.idle_share:.1%}",
            format_degrees(row.degrees, most=8),
        ]
        if not row.refusal
        else [row.policy, "–", "–", "–", "–", "–", row.refusal]
        for row in subject.policies
    ]
    heads = [
        "policy",
        "step",
        "gap",
        f"speed against {base.policy if base else '–'}",
        "waves",
        "idle",
        "degree×groups",
    ]
    refused = "; ".join(f"{row.policy}: {row.refusal}" for row in subject.policies if row.refusal)
    look = (
        "Predicted seconds a step of every policy on the same samples. "
        "Look for how much of a bar stands above the line, the bound of its own plans."
        + (f" Without a plan: {refused}." if refused else "")
        if served
        else f"No policy can plan these samples. {refused}."
    )
    if subject.origin != "planned":
        look = f"The samples of the steps in the timeline, planned again. {look}"
    drawing = _ranking(served, subject.policy) if served else ""
    return Section("policies", "Policies", look, join([drawing]), (heads, rows))


def _ranking(served: Sequence[Outcome], marked: str) -> Markup:
    tips = [
        f"{row.policy}\nstep {format_seconds(row.step_s)}\nbound {format_seconds(row.bound_s)}"
        for row in served
    ]
    times = [(row.policy, row.step_s, row.bound_s) for row in served]
    scale = charts.seconds(1.08 * max(row.step_s for row in served))
    key = element("span", element("i", class_="swatch-line"), "bound of its plans", class_="key")
    return join([element("p", key, class_="legend"), charts.ranking(times, marked, scale, tips)])
