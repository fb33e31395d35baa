"""ServeGen length histograms as samples: probabilities of lengths by time window (alibaba/ServeGen).

A file is a JSON object of windows; each holds columns, and a column is the text of a Python dict of length
to probability. That text is parsed as a literal, never evaluated.
"""

from __future__ import annotations

import ast
import json
import math
import random
from pathlib import Path
from typing import Any

from flexcp.core.errors import LengthsError
from flexcp.core.sample import Sample

DRAWS = 10_000  # samples a file becomes, spread evenly over its windows
_MOST_TEXT = 1_000_000  # characters of one histogram; real ones have a few thousand
_TEXT = ("input_tokens", "text_tokens", "output_tokens")  # a training sample is prompt and answer
_MEDIA = ("image", "video", "audio")

Histogram = dict[int, float]


def is_histogram(path: Path) -> bool:
    """Whether a file is one JSON object, which no list of lengths is."""
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def read_histogram(path: Path) -> tuple[Sample, ...]:
    """Draw 10,000 samples; the same ones every time.

    Columns are independent of each other, as nothing else is known. Images and videos come first, each a
    full-attention span; audio and text are causal.

    Raises:
        LengthsError: names the window and column that is not a histogram.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise LengthsError(f"{path}: not JSON ({type(error).__name__})", "Download it again.") from None
    windows = [_window(path, name, columns) for name, columns in body.items()]
    windows = [window for window in windows if any(name in window for name in _TEXT)]
    if not windows:
        raise LengthsError(
            f"{path} is a JSON object without histograms of tokens",
            f"Give a JSON list of lengths, or ServeGen windows with {' or '.join(_TEXT[:2])}.",
        )
    source = random.Random(0)  # noqa: S311 (no secret)
    return tuple(_draw(number, windows[number % len(windows)], source) for number in range(DRAWS))


def _window(path: Path, name: str, columns: Any) -> dict[str, Histogram]:
    if not isinstance(columns, dict):
        return {}
    known = (*_TEXT, *(f"{kind}_{what}" for kind in _MEDIA for what in ("tokens", "count")))
    read = {key: _histogram(f"{path}, window {name}, {key}", columns[key]) for key in known if key in columns}
    return {key: histogram for key, histogram in read.items() if histogram}


def _histogram(where: str, text: Any) -> Histogram:
    remedy = 'A histogram is the text of a dict: "{length: probability, ...}".'
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        raise LengthsError(f"{where}: not a text of at most {_MOST_TEXT:,} characters", remedy)
    try:
        body = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise LengthsError(f"{where}: {text[:40]!r} is not a dict", remedy) from None
    if not isinstance(body, dict):
        raise LengthsError(f"{where}: {text[:40]!r} is not a dict", remedy)
    for length, probability in body.items():
        whole = type(length) is int and length >= 0
        if not whole or not isinstance(probability, int | float) or not 0 <= probability < math.inf:
            raise LengthsError(
                f"{where}: {length!r}: {probability!r} is not a length and its probability", remedy
            )
    return body if sum(body.values()) > 0 else {}


def _draw(number: int, window: dict[str, Histogram], source: random.Random) -> Sample:
    def one(name: str, default: int) -> int:
        histogram = window.get(name)
        if histogram is None:
            return default
        return source.choices(list(histogram), list(histogram.values()))[0]

    tokens, spans = 0, []
    for kind in _MEDIA:
        for _ in range(one(f"{kind}_count", 0)):
            length = one(f"{kind}_tokens", 0)
            if length and kind != "audio":
                spans.append((tokens, tokens + length))
            tokens += length
    tokens += sum(one(name, 0) for name in _TEXT)
    return Sample(number, max(1, tokens), tuple(spans))
