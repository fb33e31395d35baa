"""Plans drawn as ranks × time for papers and pages: SVG of a fixed width that needs nothing around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flexcp.core.plan import Plan, Task
from flexcp.report.bands import BANDS, band
from flexcp.report.markup import Markup, element
from flexcp.report.scales import label_distance, round_steps
from flexcp.report.tables import format_seconds, rank_runs, task_words

_WIDTH, _LEFT, _RIGHT, _TOP, _FOOT = 960, 56, 24, 64, 66
_STYLE = """
text { font: 12px ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; fill: #57606a }
.title { font-size: 15px; font-weight: 600; fill: #1f2328 }
.page { fill: #ffffff } .idle { fill: #f1f3f5 } .label { font-size: 11px; fill: #ffffff }
.task { stroke: #ffffff; stroke-width: 0.8 } .task:hover { stroke: #1f2328; stroke-width: 1.5 }
.node { stroke: #ffffff; stroke-width: 1.6 } .tick { stroke: #aeb6bf }
.bound { stroke: #cf222e; stroke-dasharray: 4 3 } .bound-label { fill: #cf222e }
"""
_DARK_STYLE = """
text { fill: #9198a1 } .title { fill: #f0f6fc }
.page, .label { fill: #0d1117 } .idle { fill: #1b2129 }
.task { stroke: #0d1117 } .task:hover { stroke: #f0f6fc } .node { stroke: #0d1117 }
.tick { stroke: #4b535d } .bound { stroke: #ff7b72 } .bound-label { fill: #ff7b72 }
"""


def plan_svg(plan: Plan) -> str:
    """A self-contained SVG of one plan, light or dark with the reader's preference, with tooltips."""
    return plans_svg([plan])


def plans_svg(plans: Sequence[Plan]) -> str:
    """Several plans under each other on one axis of time, as `plan_svg` draws one."""
    end_s = max(plan.step_s for plan in plans)
    row = min(24.0, max(1.0, 448 / plans[0].cluster.ranks))
    panel = row * plans[0].cluster.ranks + _TOP + _FOOT
    drawn = [
        element("g", _lines(_panel(plan, row, end_s)), transform=f"translate(0 {number * panel:g})")
        for number, plan in enumerate(plans)
    ]
    inside = [
        element("title", _headline(plans[0])),
        element("style", _style()),
        element("rect", class_="page", width="100%", height="100%", rx=8),
        *drawn,
    ]
    return (
        element(
            "svg",
            _lines(inside),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_WIDTH} {panel * len(plans):g}",
            role="img",
        )
        + "\n"
    )


def _lines(parts: Sequence[Markup]) -> Markup:
    """One element a line, so that two versions of a drawing can be compared."""
    return Markup("\n".join(["", *parts, ""]))


def _style() -> Markup:
    light = " ".join(f".d{i} {{ fill: {colour.light} }}" for i, colour in enumerate(BANDS))
    dark = " ".join(f".d{i} {{ fill: {colour.dark} }}" for i, colour in enumerate(BANDS))
    return Markup(f"{_STYLE}{light}\n@media (prefers-color-scheme: dark) {{{_DARK_STYLE}{dark} }}")


def _panel(plan: Plan, row: float, end_s: float) -> list[Markup]:
    height = row * plan.cluster.ranks
    width = _WIDTH - _LEFT - _RIGHT
    per_second = width / end_s
    return [
        element("text", _headline(plan), class_="title", x=_LEFT, y=28),
        element("rect", class_="idle", x=_LEFT, y=_TOP, width=width, height=height),
        *_ranks(plan, row),
        *(part for task in plan.tasks for part in _task(plan, task, row, per_second)),
        *_times(plan, height, per_second, end_s),
        *_legend(plan, height),
    ]


def _headline(plan: Plan) -> str:
    tokens = sum(sample.tokens for sample in plan.samples)
    work = f"{len(plan.samples)} samples, {tokens / 1e6:.2f} M tokens"
    return f"{plan.policy}: {work} on {plan.cluster.ranks} ranks in {format_seconds(plan.step_s)}"


def _task(plan: Plan, task: Task, row: float, per_second: float) -> Iterator[Markup]:
    pack = plan.pack(task)
    tip = element("title", task_words(pack, task.degree, task.ranks, task.start_s, task.end_s))
    x, width = _LEFT + task.start_s * per_second, task.duration_s * per_second
    for first, last in rank_runs(task.ranks):
        y, height = _TOP + first * row, (last - first + 1) * row
        style = f"task d{band(task.degree)}"
        yield element("rect", tip, class_=style, x=x, y=y, width=width, height=height, rx=1.5)
        label = _fitting_label(task, sum(sample.tokens for sample in pack), width, height)
        if label:
            middle = {"x": x + width / 2, "y": y + height / 2 + 4}
            yield element(
                "text", label, class_="label", text_anchor="middle", pointer_events="none", **middle
            )


def _fitting_label(task: Task, tokens: int, width: float, height: float) -> str:
    """The most that fits inside the box; small and pale boxes stay bare."""
    if height < 13 or task.degree < 3:
        return ""
    count = f"{tokens / 1000:.0f}k" if tokens >= 10_000 else f"{tokens}"
    for label in (f"{count} tokens on {task.degree} ranks", f"{count} on {task.degree}", str(task.degree)):
        if len(label) * 6.4 + 8 < width:
            return label
    return ""


def _ranks(plan: Plan, row: float) -> Iterator[Markup]:
    """Rank numbers, and a line between nodes where ranks are idle."""
    ranks, node = plan.cluster.ranks, plan.cluster.ranks_per_node
    for rank in range(node, ranks, node):
        yield element("path", class_="node", d=f"M{_LEFT} {_TOP + rank * row:g}H{_WIDTH - _RIGHT}")
    for rank in range(0, ranks, label_distance(node, row)):
        baseline = _TOP + rank * row + min(row / 2, 5) + 4
        yield element("text", f"{rank}", x=_LEFT - 8, y=baseline, text_anchor="end")
    middle = _TOP + ranks * row / 2
    yield element("text", "rank", transform=f"translate(16 {middle:g}) rotate(-90)", text_anchor="middle")


def _times(plan: Plan, height: float, per_second: float, end_s: float) -> Iterator[Markup]:
    bottom = _TOP + height
    for seconds in round_steps(0.0, end_s, 8):
        if seconds <= end_s:
            x = _LEFT + seconds * per_second
            yield element("path", class_="tick", d=f"M{x:.2f} {bottom:g}v5")
            yield element("text", f"{seconds:g} s", x=x, y=bottom + 19, text_anchor="middle")
    x = _LEFT + plan.bound_s * per_second
    label = f"no plan can beat {format_seconds(plan.bound_s)} (gap {plan.gap:.3f})"
    yield element("path", class_="bound", d=f"M{x:.2f} {_TOP - 8}V{bottom + 3:g}")
    yield element("text", label, class_="bound-label", x=x + 4, y=_TOP - 12, text_anchor="end")


def _legend(plan: Plan, height: float) -> Iterator[Markup]:
    x, y = _LEFT + 152, _TOP + height + 46
    yield element("text", "ranks that share a pack:", x=_LEFT, y=y)
    shown = [(f"d{index}", BANDS[index].label) for index in sorted({band(degree) for degree in plan.degrees})]
    for style, label in [*shown, ("idle", "idle")]:
        yield element("rect", class_=style, x=x, y=y - 10, width=12, height=12, rx=2)
        yield element("text", label, x=x + 18, y=y)
        x += 66
