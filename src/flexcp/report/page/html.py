"""The page: one HTML file that holds its style, its script and its drawings, and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from flexcp.report.bands import BANDS
from flexcp.report.markup import Markup, element, join
from flexcp.report.page.sections import sections
from flexcp.report.page.subject import Subject

_KINDS = {"planned": "plan", "measured": "measured run", "simulated": "simulated run"}
_TILES = 6


def page(subject: Subject) -> str:
    """A whole HTML document; everything from outside is escaped, and no script but its own may run."""
    script, style = _file("page.js"), _file("page.css") + _band_style()
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}"
    found = sections(subject)
    head = (
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{subject.title} – FlexCP"),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(style)),
    )
    contents = element(
        "nav",
        [element("a", section.title.split(":")[0], href=f"#{section.anchor}") for section in found],
        aria_label="Contents",
    )
    body = (
        element("a", "Skip to the timeline", href="#timeline", class_="skip"),
        element("header", _title(subject), contents),
        element(
            "main",
            _verdict(subject),
            _tiles(subject),
            [section.markup() for section in found],
            _setup(subject),
        ),
        element("div", id="tip", role="status", hidden=True),
        element("script", Markup(script)),
    )
    return (
        "<!doctype html>\n"
        + _void(element("html", element("head", head), element("body", body), lang="en"))
        + "\n"
    )


def _void(markup: Markup) -> str:
    """HTML has elements without an end."""
    return markup.replace("</meta>", "").replace("</link>", "")


def _file(name: str) -> str:
    return (resources.files("flexcp.report.page") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _band_style() -> str:
    return "".join(
        f".d{index} {{ --c: light-dark({colour.light}, {colour.dark}) }}\n"
        for index, colour in enumerate(BANDS)
    )


def _title(subject: Subject) -> Markup:
    what = f"{_KINDS[subject.origin]} · {subject.subtitle} · policy {subject.policy}"
    words = (element("h1", subject.title), element("p", f"FlexCP · {what}"))
    toggle = element("button", "Dark", id="theme", type="button", aria_pressed="false")
    return element("div", element("div", words), toggle, class_="title")


def _verdict(subject: Subject) -> Markup:
    advice = [element("p", element("strong", "Do: "), text) for text in subject.advice]
    notes = [element("li", notice) for notice in subject.notices]
    return join(
        [
            element(
                "section",
                element("h2", "Verdict"),
                element("p", subject.verdict, class_="verdict"),
                advice,
                class_=f"card {'good' if subject.good else 'warn'}",
                id="verdict",
            ),
            element("ul", notes, class_="notices", aria_label="Notes") if notes else Markup(""),
        ]
    )


def _tiles(subject: Subject) -> Markup:
    tiles = [
        element("div", element("dt", name), element("dd", value)) for name, value in subject.facts[:_TILES]
    ]
    return element("dl", tiles, class_="tiles")


def _setup(subject: Subject) -> Markup:
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in subject.facts[_TILES:]
    ]
    return element(
        "section", element("h2", "Setup"), element("table", rows, class_="facts"), id="setup", class_="card"
    )
