"""Charts as SVG that fill the width they get: x in percent, y in pixels, colours from the page's style."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flexcp.report.markup import Markup, element, percent
from flexcp.report.page.subject import Curve
from flexcp.report.scales import round_steps

HEIGHT = 220
_TOP, _FOOT, _AXIS = 12, 44, 64


@dataclass(frozen=True, slots=True)
class Scale:
    """Values on the vertical axis, with the unit that suits.

    Attributes:
        low, high: what lies at the bottom and at the top.
        ticks: values with a line, and their labels.
        unit: for the title of the axis.
        height: of the chart, in pixels.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    unit: str
    height: int = HEIGHT

    def y(self, value: float) -> float:
        """Pixels from the top of the chart."""
        return _TOP + (self.bottom - _TOP) * (self.high - value) / (self.high - self.low)

    @property
    def bottom(self) -> int:
        """Where the horizontal axis is."""
        return self.height - _FOOT


def linear(low: float, high: float, unit: str = "") -> Scale:
    """An axis of plain numbers, from a round value to a round value."""
    ticks = round_steps(low, high, 4)
    step = ticks[1] - ticks[0]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    labels = tuple((tick, f"{tick:,.{decimals}f}") for tick in ticks)
    return Scale(ticks[0], ticks[-1], labels, unit)


def seconds(high: float) -> Scale:
    """An axis of time from 0, in s, ms or µs."""
    factor, unit = next(
        ((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if high * f >= 1.0),
        (1e6, "µs"),
    )
    scale = linear(0.0, high * factor, unit)
    return Scale(0.0, scale.high / factor, tuple((v / factor, text) for v, text in scale.ticks), unit)


def lines(curves: Sequence[Curve], positions: Sequence[int], scale: Scale, tips: Sequence[str]) -> Markup:
    """Curves over steps; every step is one stop with all its values.

    Args:
        curves: at least one; all of the length of `positions`.
        positions: step numbers, ascending.
        scale: the vertical axis.
        tips: what to say at each step.
    """
    count = len(positions)
    shares = [(index + 0.5) / count for index in range(count)]
    paths = [
        element(
            "path",
            class_=f"line {curve.style}",
            d="M"
            + "L".join(f"{1000 * x:.1f} {scale.y(v):.1f}" for x, v in zip(shares, curve.values, strict=True)),
        )
        for curve in curves
    ]
    stretched = element(
        "svg", *paths, viewBox=f"0 0 1000 {HEIGHT}", preserveAspectRatio="none", width="100%", height=HEIGHT
    )
    dots = [
        element("circle", class_=f"dot {curve.style}", cx=percent(x), cy=scale.y(value), r=3)
        for curve in curves
        if count <= 60
        for x, value in zip(shares, curve.values, strict=True)
    ]
    stops = [
        element(
            "rect",
            class_="stop",
            x=percent(index / count),
            width=percent(1 / count),
            y=_TOP,
            height=scale.bottom - _TOP,
            role="img",
            aria_label=tip,
        )
        for index, tip in enumerate(tips)
    ]
    return frame(scale, [stretched, *dots, *stops], _step_labels(positions, shares), "step")


def bars(
    labels: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    scale: Scale,
    tips: Sequence[str],
    title: str,
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Groups of bars; `series` are (style, heights), `limit` a line across with its words.

    Without a title below there is room for two rows of labels.
    """
    count, width = len(labels), 0.8 / len(series)
    groups = []
    for index, tip in enumerate(tips):
        lefts = [(index + 0.1 + number * width) / count for number in range(len(series))]
        boxes = [
            _bar(style, left, width * 0.94 / count, heights[index], scale)
            for left, (style, heights) in zip(lefts, series, strict=True)
        ]
        groups.append(element("g", boxes, class_="stop", role="img", aria_label=tip))
    if limit is not None:
        y = scale.y(limit[0])
        groups.append(element("line", class_="limit", x1="0", x2="100%", y1=y, y2=y))
        groups.append(element("text", limit[1], class_="limit-label", x="100%", y=y - 5, text_anchor="end"))
    return frame(scale, groups, _bar_labels(labels, rows=1 if title else 2), title)


def ranking(rows: Sequence[tuple[str, float, float]], main: str, scale: Scale, tips: Sequence[str]) -> Markup:
    """One bar a policy with its value on top and a line where its bound is.

    Args:
        rows: name, value, bound.
        main: the name to show in colour.
        scale: the vertical axis.
        tips: what to say of each.
    """
    count = len(rows)
    groups = []
    for index, ((name, value, bound), tip) in enumerate(zip(rows, tips, strict=True)):
        left, right, y = (index + 0.14) / count, (index + 0.86) / count, scale.y(bound)
        top = tip.split("\n")[1].removeprefix("step ")
        groups.append(
            element(
                "g",
                _bar("main" if name == main else "rest", left, right - left, value, scale),
                element("line", class_="mark-bound", x1=percent(left), x2=percent(right), y1=y, y2=y),
                element(
                    "text",
                    top,
                    class_="value",
                    x=percent((index + 0.5) / count),
                    y=scale.y(value) - 5,
                    text_anchor="middle",
                ),
                class_="stop",
                role="img",
                aria_label=tip,
            )
        )
    labels = [name.replace("-", "-\n", 1) for name, *_ in rows]
    return frame(scale, groups, _bar_labels(labels), "")


def _bar(style: str, left: float, width: float, value: float, scale: Scale) -> Markup:
    top = scale.y(value)
    return element(
        "rect",
        class_=f"bar {style}",
        x=percent(left),
        width=percent(width),
        y=top,
        height=max(0.0, scale.bottom - top),
    )


def _bar_labels(labels: Sequence[str], rows: int = 1) -> list[tuple[float, str]]:
    """As many as there is room for, on the rows in turn."""
    every = max(1, -(-sum(len(label) + 2 for label in labels) // (70 * rows)))
    return [
        ((index + 0.5) / len(labels), "\n" * (index // every % rows) + labels[index])
        for index in range(0, len(labels), every)
    ]


def dots(pairs: Sequence[tuple[float, float, str]], names: tuple[str, str]) -> Markup:
    """Predicted against measured, both positive and logarithmic, on the same range, with the diagonal."""
    values = [value for pair in pairs for value in pair[:2]]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    ticks = tuple((float(power), _power(power)) for power in range(low, high + 1))
    scale = Scale(float(low), float(high), ticks, f"{names[1]}, s", height=340)
    diagonal = element(
        "svg",
        element("path", class_="line bound", d=f"M0 {scale.y(low):.1f}L1000 {scale.y(high):.1f}"),
        viewBox=f"0 0 1000 {scale.height}",
        preserveAspectRatio="none",
        width="100%",
        height=scale.height,
    )
    marks = [
        element(
            "circle",
            class_="spot stop",
            cx=percent((math.log10(a) - low) / (high - low)),
            cy=scale.y(math.log10(b)),
            r=4,
            role="img",
            aria_label=tip,
        )
        for a, b, tip in pairs
    ]
    labels = [((power - low) / (high - low), _power(power)) for power in range(low, high + 1)]
    return frame(scale, [diagonal, *marks], labels, f"{names[0]}, s")


def _power(power: int) -> str:
    return f"{10.0**power:g}"


def frame(scale: Scale, inside: Sequence[Markup], labels: Sequence[tuple[float, str]], title: str) -> Markup:
    """Axes around what is drawn: a fixed column on the left, everything else as wide as there is room."""
    axis = [
        element("text", text, x=_AXIS - 8, y=scale.y(value) + 4, text_anchor="end")
        for value, text in scale.ticks
    ]
    middle = (_TOP + scale.bottom) / 2
    turned = f"translate(12 {middle:.0f}) rotate(-90)"
    axis.append(element("text", scale.unit, class_="unit", transform=turned, text_anchor="middle"))
    grid = [
        element("line", class_="grid", x1="0", x2="100%", y1=scale.y(value), y2=scale.y(value))
        for value, _ in scale.ticks
    ]
    below = [
        element("text", part, x=percent(share), y=scale.bottom + 16 + 13 * line, text_anchor=_anchor(share))
        for share, text in labels
        for line, part in enumerate(text.split("\n"))
    ]
    below.append(element("text", title, class_="unit", x="50%", y=scale.height - 6, text_anchor="middle"))
    return element(
        "div",
        element("svg", axis, class_="axis", width=_AXIS, height=scale.height, aria_hidden="true"),
        element("svg", grid, inside, below, class_="plot", width="100%", height=scale.height),
        class_="chart",
    )


def _anchor(share: float) -> str:
    return "start" if share < 0.01 else "end" if share > 0.99 else "middle"


def _step_labels(positions: Sequence[int], shares: Sequence[float]) -> list[tuple[float, str]]:
    every = max(1, -(-len(positions) // 12))
    return [(shares[index], f"{positions[index]}") for index in range(0, len(positions), every)]
