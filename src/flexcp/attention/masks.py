"""Which parts of a query block x key block are attended, as tiles that need no mask tensor.

Pure Python over a Layout. A tile is a full rectangle or a causal square, so a kernel needs no more than a
flag; together the tiles of all block pairs cover every attended entry exactly once. (A window adds squares
that are causal from the last row to the first, and is cut into tiles by `attention.windows`.)

Why that is always possible: the rows that one member holds of one sample ascend in position, and what a row
sees is always "every key before some position" (its own position, or the end of its full-attention span),
which never falls from one row to the next. So in local rows the mask is a staircase::

    rows of text in their own block   one key more per row   causal square, and a rectangle before it
    rows of a span, or of text that
    meets another member's keys       the same keys          rectangle
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from flexcp.attention.windows import Held, count_before, make_bands, runs
from flexcp.core.layout import Layout, Piece
from flexcp.core.sample import Sample


class Tile(NamedTuple):
    """Query rows [q0, q1) attend to key rows [k0, k1), local rows on either side.

    A causal tile is square, and row q0 + i attends to k0 .. k0 + i; if it is turned, to k0 + i .. k1 - 1.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    turned: bool = False


class _Stair(NamedTuple):
    """Local rows [q0, q1) see the first `keys` keys; if it rises, row q0 + i sees i + 1 more."""

    q0: int
    q1: int
    keys: int
    rises: bool


@lru_cache(maxsize=4096)
def make_tiles(layout: Layout, q_member: int, kv_member: int) -> tuple[Tile, ...]:
    """Tiles of the queries of one member against the keys of another, or its own.

    Keys are numbered by the local rows of `kv_member`. Its cut rows come first, so the numbers hold for the
    block that travels as well.

    Complexity: O(pieces + spans) per sample that both hold.

    >>> from flexcp.core.layout import make_layout
    >>> layout = make_layout((Sample(0, 8),), degree=2, whole_below_tokens=0)  # member 0: 0, 1, 6, 7
    >>> for kv_member in (0, 1):
    ...     make_tiles(layout, 0, kv_member)
    (Tile(q0=0, q1=4, k0=0, k1=4, causal=True, turned=False),)
    (Tile(q0=2, q1=4, k0=0, k1=4, causal=False, turned=False),)
    """
    queries, keys = _held_rows(layout, q_member), _held_rows(layout, kv_member)
    return _tiles(layout, queries, keys, own=q_member == kv_member)


@lru_cache(maxsize=4096)
def make_tiles_of_many(layout: Layout, q_member: int, kv_members: tuple[int, ...]) -> tuple[Tile, ...]:
    """Tiles of the queries of one member against the cut rows of many others, which lie sample by sample.

    >>> from flexcp.core.layout import make_layout
    >>> layout = make_layout((Sample(0, 12),), degree=3, whole_below_tokens=0)  # member 0: 0, 1, 10, 11
    >>> make_tiles_of_many(layout, 0, (1, 2))
    (Tile(q0=2, q1=4, k0=0, k1=8, causal=False, turned=False),)
    """
    return _tiles(layout, _held_rows(layout, q_member), _held_by_sample(layout, kv_members), own=False)


@lru_cache(maxsize=1024)
def make_tiles_of_all(layout: Layout) -> tuple[Tile, ...]:
    """Tiles of all cut rows of a pack among themselves, lying sample by sample."""
    held = _held_by_sample(layout, tuple(range(layout.degree)))
    return _tiles(layout, held, held, own=True)


def _tiles(
    layout: Layout, queries: dict[int, list[Held]], keys: dict[int, list[Held]], *, own: bool
) -> tuple[Tile, ...]:
    tiles: list[Tile] = []
    for index in queries.keys() & keys.keys() if not own else queries:
        sample, first_key = layout.samples[index], keys[index][0].row
        if layout.window is not None and layout.window < sample.tokens:
            bands = make_bands(sample, layout.window, queries[index], keys[index], own=own)
            tiles.extend(Tile(*tile) for band in bands for tile in band.tiles(first_key))
            continue
        stairs = _stairs(sample, queries[index], keys[index], own=own)
        tiles.extend(_tiles_of_stairs(stairs, first_key))
    return tuple(sorted(tiles, key=lambda tile: (tile.q0, tile.k0)))


def cut_by_sample(layout: Layout, members: tuple[int, ...]) -> list[tuple[Piece, int]]:
    """Cut pieces of some members and whose they are, sample by sample, in the order of positions."""
    pieces = [(piece, member) for member in members for piece in layout.cut[member]]
    return sorted(pieces, key=lambda item: (item[0].index, item[0].start))


@lru_cache(maxsize=1024)
def _held_by_sample(layout: Layout, members: tuple[int, ...]) -> dict[int, list[Held]]:
    """Neighbours that follow each other are one: of all members, a sample is a single run of rows."""
    held: dict[int, list[Held]] = {}
    row = 0
    for piece, _ in cut_by_sample(layout, members):
        runs_of_sample = held.setdefault(piece.index, [])
        if runs_of_sample and runs_of_sample[-1].stop == piece.start:
            runs_of_sample[-1] = runs_of_sample[-1]._replace(stop=piece.stop)
        else:
            runs_of_sample.append(Held(piece.start, piece.stop, row))
        row += piece.rows
    return held


@lru_cache(maxsize=4096)
def _held_rows(layout: Layout, member: int) -> dict[int, list[Held]]:
    """What `member` holds of each sample; the pieces of one sample are neighbours in local rows."""
    held: dict[int, list[Held]] = {}
    row = 0
    for piece in layout.pieces(member):
        held.setdefault(piece.index, []).append(Held(piece.start, piece.stop, row))
        row += piece.rows
    return held


def _stairs(sample: Sample, queries: Sequence[Held], keys: Sequence[Held], *, own: bool) -> list[_Stair]:
    """The staircase of one sample, with stairs that continue each other made one."""
    stairs: list[_Stair] = []
    for held in queries:
        for start, stop, span in runs(sample, held.start, held.stop):
            rises = own and span is None
            seen = count_before(keys, start if span is None else span[1])
            q0 = held.row + start - held.start
            stair = _Stair(q0, q0 + stop - start, seen, rises)
            before = stairs[-1] if stairs else None
            if before and before.rises == rises and _keys_after(before) == seen:
                stairs[-1] = before._replace(q1=stair.q1)
            else:
                stairs.append(stair)
    return stairs


def _keys_after(stair: _Stair) -> int:
    """Keys that the row after this stair sees if the stair goes on."""
    return stair.keys + (stair.q1 - stair.q0 if stair.rises else 0)


def _tiles_of_stairs(stairs: Sequence[_Stair], first_key: int) -> Iterator[Tile]:
    """One rectangle per run of stairs of equal keys, one square per rising stair."""
    rectangle: Tile | None = None
    for q0, q1, keys, rises in stairs:
        if rises:
            yield Tile(q0, q1, first_key + keys, first_key + keys + q1 - q0, True)
        stop = first_key + keys
        if rectangle and rectangle.k1 == stop:
            rectangle = rectangle._replace(q1=q1)
            continue
        if rectangle:
            yield rectangle
        rectangle = Tile(q0, q1, first_key, stop, False) if keys else None
    if rectangle:
        yield rectangle
