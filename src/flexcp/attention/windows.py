"""Sliding windows: a row of text sees the last `window` positions of its sample, its own included.

In local rows such a mask is a band between two staircases, which begin and end at the edges of what is held::

    row i sees keys  low + i·falls  up to  high + i·rises       falls, rises: 0 or 1, by stretch of rows

so a stretch is at most a turned square, a rectangle and a causal square.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexcp.core.sample import Sample

# (q0, q1, k0, k1, causal, turned), see `masks.Tile`.
_Tile = tuple[int, int, int, int, bool, bool]


class Held(NamedTuple):
    """Positions [start, stop) of a sample, which lie from local row `row` on."""

    start: int
    stop: int
    row: int


def count_before(held: Sequence[Held], position: int) -> int:
    """Rows held before `position`."""
    return sum(min(max(position - piece.start, 0), piece.stop - piece.start) for piece in held)


def runs(sample: Sample, start: int, stop: int) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """Cut [start, stop) into runs of text, and runs inside one span with that span."""
    for a, b in sample.spans:
        if b <= start or b - a == 1:  # a span of one row sees what text sees
            continue
        if a >= stop:
            break
        if start < a:
            yield start, a, None
        yield max(start, a), min(stop, b), (a, b)
        start = b
    if start < stop:
        yield start, stop, None


class Band(NamedTuple):
    """Row q0 + i sees the held keys from low (+ i if it falls) to before high (+ i + 1 if it rises).

    Keys are counted within the sample.
    """

    q0: int
    rows: int
    low: int
    falls: bool
    high: int
    rises: bool

    def tiles(self, first_key: int) -> Iterator[_Tile]:
        """Cover the band; keys are counted from `first_key`.

        >>> list(Band(0, 2, 1, True, 4, True).tiles(0))    # keys 1..4 for row 0, 2..5 for row 1
        [(0, 2, 1, 3, True, True), (0, 2, 3, 4, False, False), (0, 2, 4, 6, True, False)]
        """
        # Both squares are as high as the stretch is: they may not overlap.
        most = max(1, self.high - self.low) if self.falls and self.rises else self.rows
        for at in range(0, self.rows, most):
            rows = min(most, self.rows - at)
            q0, low, high = self.q0 + at, self.low + at * self.falls, self.high + at * self.rises
            low, high = first_key + low, first_key + high
            seeing = rows
            if self.falls:
                seeing = min(rows, high - low)  # rows behind these see nothing but what rises
                if seeing:
                    yield q0, q0 + seeing, low, low + seeing, True, True
                low += seeing
            if low < high:
                yield q0, q0 + seeing, low, high, False, False
            if self.rises:
                yield q0, q0 + rows, high, high + rows, True, False


def make_bands(
    sample: Sample, window: int, queries: Sequence[Held], keys: Sequence[Held], *, own: bool
) -> Iterator[Band]:
    """The bands of one sample; `own` says that the keys hold the queries' own positions.

    The window bounds what lies before a row: a row of a full-attention span sees to the end of the span, but
    no further back than any other (so do the models that have both: Gemma 3).
    """
    edges = {edge for piece in keys for edge in (piece.start, piece.stop)}
    for held in queries:
        for start, stop, span in runs(sample, held.start, held.stop):
            # Rows at which the far end of the window passes an edge of what is held.
            cuts = {edge + window - 1 for edge in edges}
            bounds = sorted({start, stop} | {cut for cut in cuts if start < cut < stop})
            for first, last in itertools.pairwise(bounds):
                far = first - window + 1
                falls = any(p.start <= far < p.stop for p in keys)
                yield Band(
                    held.row + first - held.start,
                    last - first,
                    count_before(keys, far),
                    falls,
                    count_before(keys, first if span is None else span[1]),
                    rises=own and span is None,
                )
