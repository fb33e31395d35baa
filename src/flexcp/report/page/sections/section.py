"""One plot of the page, with all that is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexcp.report.markup import Markup, element


@dataclass(frozen=True, slots=True)
class Section:
    """One plot.

    Attributes:
        anchor: its id in the page.
        title, look: heading, and the sentence that says what to look for.
        drawing: the plot, with its legend.
        table: its numbers: heads, then rows.
    """

    anchor: str
    title: str
    look: str
    drawing: Markup
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None

    def markup(self) -> Markup:
        """The section as HTML."""
        return element(
            "section",
            element("h2", self.title),
            element("p", self.look, class_="look"),
            element("figure", self.drawing, role="group", aria_label=self.title),
            _numbers(*self.table) if self.table else "",
            id=self.anchor,
            class_="card",
        )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Cells as text."""
    head = element("tr", [element("th", name, scope="col") for name in heads])
    body = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    return element("table", element("thead", head), element("tbody", body))


def _numbers(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """The table below a plot, folded away."""
    scroll = element("div", table(heads, rows), class_="scroll")
    return element("details", element("summary", "Numbers"), scroll)


def legend(keys: Sequence[tuple[str, str]]) -> Markup:
    """Swatches with their words: pairs of style and name."""
    spans = [
        element("span", element("i", class_=f"swatch {style}"), name, class_="key") for style, name in keys
    ]
    return element("p", spans, class_="legend")
