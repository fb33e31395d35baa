"""One plan drawn as ranks × time: text for a terminal, SVG for a page. Returns strings, prints nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from rich.style import Style
from rich.text import Text

from flexcp.core.plan import Plan, Task
from flexcp.report.bands import BANDS, band
from flexcp.report.tables import format_ranks, format_seconds, rank_runs

_IDLE = "#20242a"
_DEGREE_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def plan_timeline(plan: Plan, *, width: int = 100, rows: int = 16, colour: bool = True) -> Text:
    """Ranks from top to bottom, time from left to right.

    In colour one text row shows two ranks as half blocks; without, one rank, each task as its degree
    (1–9, then a = 10, b = 11, …) and idle time as a dot. Where ranks outnumber the rows, every k-th shows.
    """
    ranks = _shown_ranks(plan.cluster.ranks, rows * 2 if colour else rows)
    margin = len(str(ranks[-1])) + 1
    columns = max(16, width - margin - 1)
    grid = [_cells(plan, rank, columns) for rank in ranks]
    text = Text(no_wrap=True, overflow="crop")
    if colour:
        for top in range(0, len(ranks), 2):
            text.append(f"{ranks[top]:>{margin - 1}} ", style="dim")
            lower = grid[top + 1] if top + 1 < len(ranks) else [None] * columns
            for upper_task, lower_task in zip(grid[top], lower, strict=True):
                style = Style(color=_shade(plan, upper_task), bgcolor=_shade(plan, lower_task))
                text.append("▀", style=style)
            text.append("\n")
    else:
        for rank, cells in zip(ranks, grid, strict=True):
            text.append(f"{rank:>{margin - 1}} " + "".join(_mark(plan, cell) for cell in cells) + "\n")
    text.append(" " * margin + _time_axis(plan.step_s, columns) + "\n", style="dim")
    text.append(" " * margin)
    text.append_text(_legend(plan, colour))
    return text


def _shown_ranks(ranks: int, most: int) -> list[int]:
    stride = -(-ranks // most)
    return list(range(0, ranks, stride))


def _cells(plan: Plan, rank: int, columns: int) -> list[int | None]:
    """Index of the task in each column, None where the rank is idle."""
    cells: list[int | None] = [None] * columns
    for index in plan.tasks_of(rank):
        task = plan.tasks[index]
        first = round(task.start_s / plan.step_s * columns)
        last = max(first + 1, round(task.end_s / plan.step_s * columns))
        cells[first:last] = [index] * (min(last, columns) - first)
    return cells


def _shade(plan: Plan, index: int | None) -> str:
    """Colour of the degree; every other task a shade down, to tell neighbours of one degree apart."""
    if index is None:
        return _IDLE
    task = plan.tasks[index]
    colour = BANDS[band(task.degree)].light
    if (task.wave + index) % 2 == 0:
        return colour
    return "#" + "".join(f"{int(colour[i : i + 2], 16) * 4 // 5:02x}" for i in (1, 3, 5))


def _mark(plan: Plan, index: int | None) -> str:
    if index is None:
        return "·"
    degree = plan.tasks[index].degree
    return _DEGREE_MARKS[degree] if degree < len(_DEGREE_MARKS) else "+"


def _time_axis(step_s: float, columns: int) -> str:
    end = format_seconds(step_s)
    middle = format_seconds(step_s / 2)
    left = "0" + middle.rjust(columns // 2 + len(middle) // 2)[1:]
    return left + end.rjust(columns - len(left))


def _legend(plan: Plan, colour: bool) -> Text:
    if not colour:
        note = " (a = 10, b = 11, …)" if max(plan.degrees) > 9 else ""
        return Text(f"a mark is the degree of the task{note}, · is idle")
    text = Text("degree ")
    for index in sorted({band(degree) for degree in plan.degrees}):
        text.append(" ■ ", style=BANDS[index].light)
        text.append(BANDS[index].label)
    text.append(" ■ ", style=_IDLE)
    return text.append("idle")


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
    height = row * plans[0].cluster.ranks
    light = " ".join(f".d{i} {{ fill: {colour.light} }}" for i, colour in enumerate(BANDS))
    dark = " ".join(f".d{i} {{ fill: {colour.dark} }}" for i, colour in enumerate(BANDS))
    panel = height + _TOP + _FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {panel * len(plans):g}" role="img">',
        f"<title>{escape(_headline(plans[0]))}</title>",
        f"<style>{_STYLE}{light}\n@media (prefers-color-scheme: dark) {{{_DARK_STYLE}{dark} }}</style>",
        '<rect class="page" width="100%" height="100%" rx="8"/>',
    ]
    for number, plan in enumerate(plans):
        drawn = _svg_panel(plan, row, end_s)
        if number:
            drawn = [f'<g transform="translate(0 {number * panel:g})">', *drawn, "</g>"]
        lines.extend(drawn)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _svg_panel(plan: Plan, row: float, end_s: float) -> list[str]:
    height = row * plan.cluster.ranks
    per_second = (_WIDTH - _LEFT - _RIGHT) / end_s
    return [
        f'<text class="title" x="{_LEFT}" y="28">{escape(_headline(plan))}</text>',
        f'<rect class="idle" x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{height:g}"/>',
        *_svg_ranks(plan, row),
        *(line for task in plan.tasks for line in _svg_task(plan, task, row, per_second)),
        *_svg_times(plan, height, per_second, end_s),
        *_svg_legend(plan, height),
    ]


def _headline(plan: Plan) -> str:
    tokens = sum(sample.tokens for sample in plan.samples)
    work = f"{len(plan.samples)} samples, {tokens / 1e6:.2f} M tokens"
    return f"{plan.policy}: {work} on {plan.cluster.ranks} ranks in {format_seconds(plan.step_s)}"


def _svg_task(plan: Plan, task: Task, row: float, per_second: float) -> Iterator[str]:
    pack = plan.pack(task)
    tokens = sum(sample.tokens for sample in pack)
    tip = (
        f"degree {task.degree} on ranks {format_ranks(task.ranks)}\n"
        f"{len(pack)} sample{'s' if len(pack) > 1 else ''}, {tokens:,} tokens, "
        f"longest {max(sample.tokens for sample in pack):,}\n"
        f"wave {task.wave}, from {task.start_s:.3f} s to {task.end_s:.3f} s"
    )
    x, width = _LEFT + task.start_s * per_second, task.duration_s * per_second
    for first, last in rank_runs(task.ranks):
        y, height = _TOP + first * row, (last - first + 1) * row
        yield (
            f'<rect class="task d{band(task.degree)}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
            f'height="{height:.2f}" rx="1.5"><title>{escape(tip)}</title></rect>'
        )
        label = _fitting_label(task, tokens, width, height)
        if label:
            middle = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 4:.2f}"'
            yield f'<text class="label" text-anchor="middle" pointer-events="none" {middle}>{label}</text>'


def _fitting_label(task: Task, tokens: int, width: float, height: float) -> str:
    """The most that fits inside the box; small and pale boxes stay bare."""
    if height < 13 or task.degree < 3:
        return ""
    count = f"{tokens / 1000:.0f}k" if tokens >= 10_000 else f"{tokens}"
    for label in (f"{count} tokens on {task.degree} ranks", f"{count} on {task.degree}", str(task.degree)):
        if len(label) * 6.4 + 8 < width:
            return label
    return ""


def _svg_ranks(plan: Plan, row: float) -> Iterator[str]:
    """Rank numbers at the start of each node, and a line between nodes where ranks are idle."""
    ranks, node = plan.cluster.ranks, plan.cluster.ranks_per_node
    every = node * max(1, math.ceil(14 / (node * row)))
    for rank in range(0, ranks, node):
        y = _TOP + rank * row
        if rank:
            yield f'<path class="node" d="M{_LEFT} {y:g}H{_WIDTH - _RIGHT}"/>'
        if rank % every == 0:
            baseline = y + min(row / 2, 5) + 4
            yield f'<text x="{_LEFT - 8}" y="{baseline:g}" text-anchor="end">{rank}</text>'
    middle = _TOP + ranks * row / 2
    yield f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">rank</text>'


def _svg_times(plan: Plan, height: float, per_second: float, end_s: float) -> Iterator[str]:
    bottom = _TOP + height
    for seconds in _ticks(end_s):
        x = _LEFT + seconds * per_second
        yield f'<path class="tick" d="M{x:.2f} {bottom:g}v5"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 19:g}" text-anchor="middle">{seconds:g} s</text>'
    x = _LEFT + plan.bound_s * per_second
    label = f"no plan can beat {format_seconds(plan.bound_s)} (gap {plan.gap:.3f})"
    yield f'<path class="bound" d="M{x:.2f} {_TOP - 8}V{bottom + 3:g}"/>'
    yield f'<text class="bound-label" x="{x + 4:.2f}" y="{_TOP - 12}" text-anchor="end">{label}</text>'


def _ticks(end_s: float) -> Sequence[float]:
    """About eight round times from 0 to the end."""
    rough = end_s / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [index * step for index in range(int(end_s / step) + 1)]


def _svg_legend(plan: Plan, height: float) -> Iterator[str]:
    y = _TOP + height + 46
    x = _LEFT
    yield f'<text x="{x}" y="{y:g}">ranks that share a pack:</text>'
    x += 152
    for index in sorted({band(degree) for degree in plan.degrees}):
        yield f'<rect class="d{index}" x="{x}" y="{y - 10:g}" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18}" y="{y:g}">{BANDS[index].label}</text>'
        x += 66
    yield f'<rect class="idle" x="{x}" y="{y - 10:g}" width="12" height="12" rx="2"/>'
    yield f'<text x="{x + 18}" y="{y:g}">idle</text>'
