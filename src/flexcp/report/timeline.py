"""One plan drawn as ranks × time for a terminal; prints nothing itself."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text

from flexcp.core.plan import Plan
from flexcp.report.bands import BANDS, band
from flexcp.report.scales import shown_ranks
from flexcp.report.tables import format_seconds

_IDLE = "#20242a"
_DEGREE_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def plan_timeline(plan: Plan, *, width: int = 100, rows: int = 16, colour: bool = True) -> Text:
    """Ranks from top to bottom, time from left to right.

    In colour one text row shows two ranks as half blocks; without, one rank, each task as its degree
    (1–9, then a = 10, b = 11, …) and idle time as a dot. Where ranks outnumber the rows, every k-th shows.
    """
    ranks = shown_ranks(plan.cluster.ranks, rows * 2 if colour else rows)
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
