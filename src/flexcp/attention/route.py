"""Who passes what to whom, where it lies then, and how many bytes that is; nothing is sent here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.attention.masks import Tile, cut_by_sample, make_tiles
from flexcp.attention.upload import upload
from flexcp.core.layout import Layout


@dataclass(frozen=True, slots=True)
class Block:
    """Keys and values of one member, as they pass by.

    Attributes:
        rows: cut rows of the member that owns the block.
        tiles: what the queries here attend to in it.
    """

    rows: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """The ring of one member.

    Only members that hold cut rows are in the ring: the others have nothing to give and nothing to ask for,
    so no message is ever empty.

    Attributes:
        next, previous: neighbours, as members of the group; the member itself when it is alone.
        blocks: its own block first, then those of its predecessors in the order they arrive.
    """

    next: int
    previous: int
    blocks: tuple[Block, ...]


@lru_cache(maxsize=4096)
def make_route(layout: Layout, member: int) -> Route:
    """The ring as `member` sees it; pure and cached, since every layer asks for it.

    >>> from flexcp.core.layout import make_layout
    >>> from flexcp.core.sample import Sample
    >>> layout = make_layout((Sample(0, 2),), degree=3, whole_below_tokens=0)  # member 2 has no row
    >>> route = make_route(layout, 0)
    >>> route.next, [block.rows for block in route.blocks]
    (1, [1, 1])
    """
    ring = [m for m in range(layout.degree) if layout.cut_rows(m)]
    if member not in ring:
        ring = [member]
    place = ring.index(member)
    owners = [ring[place - step] for step in range(len(ring))]
    blocks = tuple(Block(layout.cut_rows(owner), make_tiles(layout, member, owner)) for owner in owners)
    return Route(ring[(place + 1) % len(ring)], ring[place - 1], blocks)


@lru_cache(maxsize=256)
def rows_by_sample(layout: Layout, members: tuple[int, ...], device: torch.device) -> dict[int, Tensor]:
    """Where the cut rows of each member lie when those of all of them lie sample by sample; int64 [rows].

    Cached on the device: every layer asks in both passes.

    >>> from flexcp.core.layout import make_layout
    >>> from flexcp.core.sample import Sample
    >>> layout = make_layout((Sample(0, 8),), degree=2, whole_below_tokens=0)  # member 0: 0, 1, 6, 7
    >>> rows_by_sample(layout, (0, 1), torch.device("cpu"))[0].tolist()
    [0, 1, 6, 7]
    """
    ranges: dict[int, list[NDArray[np.int64]]] = {member: [np.arange(0)] for member in members}
    row = 0
    for piece, member in cut_by_sample(layout, members):
        ranges[member].append(np.arange(row, row + piece.rows))
        row += piece.rows
    rows = {member: torch.from_numpy(np.concatenate(parts)) for member, parts in ranges.items()}
    return {member: upload(of_member, device) for member, of_member in rows.items()}


class Traffic(NamedTuple):
    """Bytes that one member sends for one layer."""

    forward: int
    backward: int


def ring_traffic_bytes(
    layout: Layout, member: int, kv_heads: int, head_dim: int, dtype_bytes: int
) -> Traffic:
    """Bytes that `member` sends in the forward and in the backward pass of one layer.

    Forward: every block but the last is passed on, as K and V. Backward: the same again, and the gradient
    of every block but its own, in fp32 (fp64 for fp64).
    """
    rows = [block.rows for block in make_route(layout, member).blocks]
    elements_per_row = 2 * kv_heads * head_dim
    forward = sum(rows[:-1]) * elements_per_row * dtype_bytes
    gradients = sum(rows[1:]) * elements_per_row * max(dtype_bytes, 4)
    return Traffic(forward, forward + gradients)
