"""Tiles as kernel calls: one call a tile, or all tiles of a step that one call can take.

A kernel that knows `cu_seqlens` attends within many sequences at once. Here each tile is such a sequence:
rows of queries and keys that are contiguous in the call. A step of pure causal samples is one call, however
many samples there are; masks with spans take a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flexcp.attention.masks import Tile
from flexcp.attention.upload import upload

# Rows of a tensor: a range where they lie side by side, else int64 [n] on the device. A turned tile is its
# rows from the last to the first.
Rows = slice | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Where the sequences of a call begin and end in its rows.

    Attributes:
        q_stops, k_stops: ends of the sequences, on the host; none is empty.
        cu_q, cu_k: the same on the device, int32 [sequences + 1], beginning with 0.
        max_q, max_k: rows of the longest.
    """

    q_stops: tuple[int, ...]
    k_stops: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a kernel computes at once.

    Attributes:
        q, k: rows of the queries, and of the keys, that it takes; no row twice.
        causal: all of its tiles are causal squares, or none is.
        bounds: its tiles as sequences; None where it is one tile for a kernel that takes no more.
    """

    q: Rows
    k: Rows
    causal: bool
    bounds: Bounds | None = None


@lru_cache(maxsize=1024)
def one_by_one(tiles: tuple[Tile, ...], device: torch.device) -> tuple[Call, ...]:
    """A call a tile."""
    return tuple(Call(*_rows_of([tile], device), tile.causal) for tile in tiles)


@lru_cache(maxsize=1024)
def together(tiles: tuple[Tile, ...], device: torch.device) -> tuple[Call, ...]:
    """As few calls as keep every row of queries and of keys to one tile of a call.

    So what calls give can be added up row by row, in one order, with no two writing to one row. Cached: each
    layer asks in both passes, and the tables are uploaded once.

    >>> tiles = Tile(0, 4, 0, 4, True), Tile(4, 6, 4, 6, True)  # two samples in their own block
    >>> [call] = together(tiles, torch.device("cpu"))
    >>> call.q, call.bounds.cu_q.tolist()
    (slice(0, 6, None), [0, 4, 6])
    >>> tiles = Tile(2, 4, 0, 4, False), Tile(5, 6, 4, 6, False)  # the later half of each sees another block
    >>> [call] = together(tiles, torch.device("cpu"))
    >>> call.q.tolist(), call.k
    ([2, 3, 5], slice(0, 6, None))
    """
    groups: list[list[Tile]] = []
    for tile in tiles:
        for group in groups:
            last = group[-1]
            if last.causal == tile.causal and last.q1 <= tile.q0 and last.k1 <= tile.k0:
                group.append(tile)
                break
        else:
            groups.append([tile])
    return tuple(_call(group, device) for group in groups)


def _call(tiles: Sequence[Tile], device: torch.device) -> Call:
    bounds = bounds_of([t.q1 - t.q0 for t in tiles], [t.k1 - t.k0 for t in tiles], device)
    return Call(*_rows_of(tiles, device), tiles[0].causal, bounds)


def bounds_of(q_rows: Sequence[int], k_rows: Sequence[int], device: torch.device) -> Bounds:
    """Sequences of so many rows of queries and of keys, side by side."""
    q_stops, k_stops = tuple(accumulate(q_rows)), tuple(accumulate(k_rows))
    cu = upload(torch.tensor([(0, *q_stops), (0, *k_stops)], dtype=torch.int32), device)
    return Bounds(q_stops, k_stops, cu[0], cu[1], max(q_rows), max(k_rows))


def _rows_of(tiles: Sequence[Tile], device: torch.device) -> tuple[Rows, Rows]:
    """Of the queries and of the keys."""
    turned = [tile.turned for tile in tiles]
    queries, keys = [(t.q0, t.q1) for t in tiles], [(t.k0, t.k1) for t in tiles]
    return _rows(queries, turned, device), _rows(keys, turned, device)


def _rows(ranges: Sequence[tuple[int, int]], turned: Sequence[bool], device: torch.device) -> Rows:
    if not any(turned) and all(before[1] == after[0] for before, after in pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    parts = [torch.arange(start, stop) for start, stop in ranges]
    rows = torch.cat([part.flip(0) if turn else part for part, turn in zip(parts, turned, strict=True)])
    return upload(rows, device)


def take(x: Tensor, rows: Rows) -> Tensor:
    """Rows of `x`: a view where they lie side by side, else a copy."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def add_(x: Tensor, rows: Rows, part: Tensor) -> None:
    """Add `part` to rows of `x`, in the dtype of `x`."""
    if isinstance(rows, slice):
        x[rows] += part
    else:
        x.index_add_(0, rows, part.to(x.dtype))
