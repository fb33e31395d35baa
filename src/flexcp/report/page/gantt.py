"""Ranks × time of one step, its panels under each other on one axis of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexcp.report.bands import BANDS, band
from flexcp.report.markup import Markup, element, percent
from flexcp.report.page.charts import Scale, seconds
from flexcp.report.page.limits import MOST_BOXES, MOST_ROWS
from flexcp.report.page.subject import Box, Mark, Panel, Timeline
from flexcp.report.scales import label_distance, shown_ranks
from flexcp.report.tables import format_seconds, rank_runs, task_words

AXIS = 64
_HEAD, _FOOT = 26, 40


@dataclass(frozen=True, slots=True)
class Gantt:
    """A timeline drawn: `labels` go left of `plot`, which may be wider than the page; both are as high."""

    labels: Markup
    plot: Markup
    notice: str = ""


def draw(timeline: Timeline) -> Gantt:
    """Draw one step, as many of its ranks as a page can show."""
    rows, notice = _affordable(timeline, shown_ranks(timeline.cluster.ranks, MOST_ROWS))
    row = min(22.0, max(5.0, 400.0 / len(rows)))
    ends_s = [panel.end_s for panel in timeline.panels]
    ends_s += [mark.end_s for panel in timeline.panels for mark in panel.marks]
    end_s = max(ends_s) or 1.0  # a clock too coarse for anything
    scale = seconds(end_s)
    height = row * len(rows)
    parts: list[Markup] = []
    labels: list[Markup] = []
    for number, panel in enumerate(timeline.panels):
        top = number * (height + _HEAD) + _HEAD
        parts.append(_panel(panel, rows, row, top, end_s))
        labels.extend(_labels(rows, row, top, timeline.cluster.ranks_per_node))
        if number == 0:
            parts.extend(_bound(timeline.bound_s, end_s, top, height))
    bottom = len(timeline.panels) * (height + _HEAD)
    parts.extend(_ticks(scale, end_s, bottom))
    total = bottom + _FOOT
    return Gantt(
        element("svg", labels, class_="axis", width=AXIS, height=total, aria_hidden="true"),
        element("svg", parts, class_="gantt", width="100%", height=total),
        notice,
    )


def _affordable(timeline: Timeline, ranks: Sequence[int]) -> tuple[list[int], str]:
    """Fewer rows where there are more boxes than a page should hold."""
    stride = 1
    while stride < len(ranks) and _count(timeline, set(ranks[::stride])) > MOST_BOXES:
        stride *= 2
    rows = list(ranks[::stride])
    few = f"Step {timeline.step} has many tasks; its timeline shows {len(rows)} ranks." if stride > 1 else ""
    return rows, few


def _count(timeline: Timeline, rows: set[int]) -> int:
    return sum(sum(rank in rows for rank in box.ranks) for panel in timeline.panels for box in panel.boxes)


def _panel(panel: Panel, rows: Sequence[int], row: float, top: float, end_s: float) -> Markup:
    place = {rank: index for index, rank in enumerate(rows)}
    height = row * len(rows)
    ground = element("rect", class_="idle", x="0", y=top, width="100%", height=height)
    shown = sorted(panel.boxes, key=lambda box: (box.start_s, box.ranks))
    boxes = [drawn for box in shown if (drawn := _box(box, place, row, top, end_s))]
    marks = [_mark(mark, place, row, top, end_s) for mark in panel.marks if mark.rank in place]
    title = f"{panel.name}: {format_seconds(panel.end_s)}"
    head = element("text", title, class_="panel-title", x="0", y=top - 9)
    return element("g", head, ground, marks, boxes, class_="panel", data_name=panel.name)


def _box(box: Box, place: dict[int, int], row: float, top: float, end_s: float) -> Markup | None:
    rects = []
    for first, last, start_s, stop_s in _stretches(box, place):
        rects.append(
            element(
                "rect",
                x=percent(start_s / end_s),
                width=percent(max(0.0, stop_s - start_s) / end_s),
                y=top + first * row,
                height=(last - first + 1) * row,
            )
        )
    if not rects:
        return None
    style = f"task stop d{band(box.degree)}"
    return element("g", rects, class_=style, role="img", data_k=box.key, aria_label=_tip(box))


def _stretches(box: Box, place: dict[int, int]) -> Iterator[tuple[int, int, float, float]]:
    """First and last row, start and end: one for neighbouring rows, or one a rank where each has its own."""
    if box.by_rank:
        for rank, (start_s, stop_s) in box.by_rank.items():
            if rank in place:
                yield place[rank], place[rank], start_s, stop_s
        return
    for first, last in rank_runs([place[rank] for rank in box.ranks if rank in place]):
        yield first, last, box.start_s, box.end_s


def _tip(box: Box) -> str:
    waited = f"\nwaited {format_seconds(box.ring_wait_s)} for messages" if box.ring_wait_s else ""
    return task_words(box.pack, box.degree, box.ranks, box.start_s, box.end_s) + waited


def _mark(mark: Mark, place: dict[int, int], row: float, top: float, end_s: float) -> Markup:
    start_s = max(0.0, mark.start_s)
    title = element("title", f"{mark.name}, {format_seconds(mark.end_s - mark.start_s)}")
    return element(
        "rect",
        title,
        class_="mark",
        x=percent(start_s / end_s),
        width=percent(max(0.0, mark.end_s - start_s) / end_s),
        y=top + place[mark.rank] * row + row * 0.4,
        height=row * 0.2,
    )


def _labels(rows: Sequence[int], row: float, top: float, ranks_per_node: int) -> Iterator[Markup]:
    """Numbers of ranks as dense as they can be read; the first of a node in bold."""
    stride = rows[1] - rows[0] if len(rows) > 1 else 1
    apart = label_distance(ranks_per_node, row / stride)
    for index, rank in enumerate(rows):
        if rank % apart:
            continue
        yield element(
            "text",
            f"{rank}",
            class_="node" if rank % ranks_per_node == 0 else None,
            x=AXIS - 8,
            y=top + index * row + min(row, 14) / 2 + 4,
            text_anchor="end",
        )
    middle = top + row * len(rows) / 2
    turned = f"translate(12 {middle:.0f}) rotate(-90)"
    yield element("text", "rank", class_="unit", transform=turned, text_anchor="middle")


def _bound(bound_s: float, end_s: float, top: float, height: float) -> Iterator[Markup]:
    x = percent(bound_s / end_s)
    yield element("line", class_="limit", x1=x, x2=x, y1=top - 6, y2=top + height)
    text = f"bound {format_seconds(bound_s)}"
    side = "end" if bound_s > end_s / 2 else "start"
    yield element("text", text, class_="limit-label", x=x, y=top - 9, text_anchor=side)


def _ticks(scale: Scale, end_s: float, bottom: float) -> Iterator[Markup]:
    for value, text in scale.ticks:
        if value <= end_s * 1.0001:
            x, last = percent(value / end_s), value > end_s * 0.97
            anchor = "end" if last else "middle" if value else "start"
            yield element("line", class_="tick", x1=x, x2=x, y1=bottom, y2=bottom + 5)
            yield element("text", text, x=x, y=bottom + 18, text_anchor=anchor)
    title = f"time from the start of the step, {scale.unit}"
    yield element("text", title, class_="unit", x="50%", y=bottom + 35, text_anchor="middle")


def legend(degrees: Sequence[int], marks: bool) -> Markup:
    """Colours of the degrees that occur."""
    keys = [
        element("span", element("i", class_=f"swatch d{index}"), BANDS[index].label, class_="key")
        for index in sorted({band(degree) for degree in degrees})
    ]
    keys.append(element("span", element("i", class_="swatch idle"), "idle", class_="key"))
    if marks:
        words = "reduction with its wait, optimizer"
        keys.append(element("span", element("i", class_="swatch mark thin"), words, class_="key"))
    return element("p", "ranks that share a pack: ", keys, class_="legend")
