"""Colours of degrees, the same in every drawing: blue where few ranks share a pack, orange where many do.

Blue and orange are told apart by every common form of colour blindness; within each, lightness tells.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Band(NamedTuple):
    """Degrees drawn in one colour, on light and on dark ground."""

    upto: float
    label: str
    light: str
    dark: str


# What deserves a look in a plan is where many ranks share one pack.
BANDS = (
    Band(1, "1", "#c3d7e6", "#3a5064"),
    Band(2, "2", "#8abbdc", "#3b759f"),
    Band(4, "3–4", "#4690c8", "#4f9fd8"),
    Band(8, "5–8", "#1d5c99", "#a3d0f3"),
    Band(16, "9–16", "#d07c00", "#f0b04a"),
    Band(math.inf, "17+", "#983a06", "#ea7440"),
)


def band(degree: int) -> int:
    """Index of the colour of a degree.

    >>> BANDS[band(3)].label, BANDS[band(400)].label
    ('3–4', '17+')
    """
    return next(index for index, band in enumerate(BANDS) if degree <= band.upto)
