"""HTML and SVG elements as strings in which everything is escaped unless an element made it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Attribute = str | int | float | bool | None
Child = str | Iterable[str]


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element; children that are not `Markup` are text.

    Names of attributes lose a trailing underscore and have dashes for the others. None and False leave an
    attribute out, True gives it no value. Numbers are cut to three decimals.

    >>> element("a", "<b>", element("i", "x"), class_="k", data_k=1.23456)
    '<a class="k" data-k="1.235">&lt;b&gt;<i>x</i></a>'
    """
    head = "".join(_attribute(key, value) for key, value in attributes.items())
    return Markup(f"<{name}{head}>{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """Several elements or texts after each other."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(escape(child))
        else:
            parts.append(join(child))
    return Markup("".join(parts))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value) if isinstance(value, str) else _number(value)}"'


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def percent(share: float) -> str:
    """A share of the width.

    >>> percent(0.12345678)
    '12.346%'
    """
    return f"{_number(100.0 * share)}%"
