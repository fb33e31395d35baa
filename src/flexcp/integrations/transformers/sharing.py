"""The vision encoder's work inside a group: who encodes which image, and how features reach their rows.

The images of a sample are dealt out to the ranks that hold rows of it. Features then travel to the ranks
whose rows they are, and their gradients come back the same way: every image is encoded once, and the
encoder's gradient is that of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexcp.attention.exchange import BACK, FORTH, Exchange, Message, Swap
from flexcp.core.layout import Layout

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SampleImages:
    """What is encoded for one sample.

    Attributes:
        units: features of each part that the encoder can run alone (an image, a tile, a frame of a video).
        work: how dear each is, in any unit that is the same for all.
        features: per row of the sample the feature that stands there, counted through all units; -1 for text.
    """

    units: tuple[int, ...]
    work: tuple[int, ...]
    features: Rows


@dataclass(frozen=True)
class Route:
    """One member's part in the images of a pack.

    Attributes:
        encode: parts that it encodes: place of the sample in the pack, and of the part in the sample.
        encoded_rows: features that this gives.
        rows: its rows that are image.
        sends: per member, which of the features it encoded go there, in order.
        receives: per member, which of its image rows they fill; itself included, where nothing travels.
        most_rows: no message of the group is longer.
    """

    encode: tuple[tuple[int, int], ...]
    encoded_rows: int
    rows: int
    sends: Mapping[int, Tensor]
    receives: Mapping[int, Tensor]
    most_rows: int


def deal(work: Sequence[int], members: Sequence[int], turn: int) -> list[int]:
    """Who encodes each part: the dearest first, to whom has the least.

    Args:
        work: of each part.
        members: who may.
        turn: where to begin, so that packs of many samples with one image each spread.

    >>> deal([5, 1, 1, 4], [0, 1, 2], turn=1)
    [1, 0, 0, 2]
    """
    order = [members[(turn + i) % len(members)] for i in range(len(members))]
    load = dict.fromkeys(order, 0)
    given = [0] * len(work)
    for unit in sorted(range(len(work)), key=lambda unit: -work[unit]):
        member = min(order, key=load.__getitem__)
        given[unit] = member
        load[member] += work[unit]
    return given


def make_route(layout: Layout, member: int, images: Mapping[int, SampleImages]) -> Route:
    """What `member` encodes, sends and receives.

    Args:
        layout: where the rows of the pack lie.
        member: of the group.
        images: of every sample with images of which the member holds a row; by place in the pack.
    """
    slots, rows = _slots(layout, member, images)
    encode: list[tuple[int, int]] = []
    encoded_rows = 0
    sends: dict[int, list[Rows]] = {}
    receives: dict[int, list[Rows]] = {}
    for index, sample in sorted(images.items()):
        holders = _holders(layout, index)
        members = deal(sample.work, list(holders), turn=index)
        owner = np.repeat(np.array(members, dtype=np.int64), sample.units)  # of each feature
        mine = owner == member
        place = encoded_rows + np.cumsum(mine) - 1  # of each feature among those that this member encodes
        encode += [(index, unit) for unit, who in enumerate(members) if who == member]
        encoded_rows += int(mine.sum())
        for holder, wanted in holders.items():
            features = _features(sample, wanted)
            if holder == member:
                for source in set(owner[features].tolist()):
                    receives.setdefault(source, []).append(slots[index][owner[features] == source])
            if (from_here := features[mine[features]]).size:
                sends.setdefault(holder, []).append(place[from_here])
    most_rows = max(layout.cut_rows(other) for other in range(layout.degree))
    return Route(tuple(encode), encoded_rows, rows, _joined(sends), _joined(receives), most_rows)


def _holders(layout: Layout, index: int) -> dict[int, list[tuple[int, int]]]:
    """Members that hold rows of a sample, and which rows, in their order."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for member in range(layout.degree):
        for piece in layout.pieces(member):
            if piece.index == index:
                holders.setdefault(member, []).append((piece.start, piece.stop))
    return holders


def _features(sample: SampleImages, pieces: Sequence[tuple[int, int]]) -> Rows:
    rows = np.concatenate([sample.features[start:stop] for start, stop in pieces])
    return rows[rows >= 0]


def _slots(layout: Layout, member: int, images: Mapping[int, SampleImages]) -> tuple[dict[int, Rows], int]:
    """Numbers of a member's image rows, by sample, and how many there are; counted in its local order."""
    slots: dict[int, list[Rows]] = {index: [] for index in images}
    count = 0
    for piece in layout.pieces(member):
        if piece.index in images:
            here = int((images[piece.index].features[piece.start : piece.stop] >= 0).sum())
            slots[piece.index].append(np.arange(count, count + here))
            count += here
    return {index: np.concatenate(parts) for index, parts in slots.items()}, count


def _joined(parts: Mapping[int, list[Rows]]) -> dict[int, Tensor]:
    joined = {member: torch.from_numpy(np.concatenate(rows)) for member, rows in parts.items()}
    return {member: rows for member, rows in joined.items() if len(rows)}


def share_features(features: Tensor, route: Route, exchange: Exchange, *, trained: bool) -> Tensor:
    """Features of this member's image rows [route.rows, W] from those that it encoded itself.

    Every member of the group calls it, and runs its backward if any member does. So the result asks for a
    gradient wherever the encoder is trained, also on a member that encoded nothing.

    Args:
        features: [route.encoded_rows, W]; W and dtype are the same on all members.
        route: of this member.
        exchange: the way to the others.
        trained: whether the encoder is, on all members alike.
    """
    tick = torch.zeros((), requires_grad=trained and torch.is_grad_enabled())
    shared: Tensor = _Share.apply(features, tick, route, exchange)  # type: ignore[no-untyped-call]
    return shared


class _Share(torch.autograd.Function):
    """Everything that backward needs lives in `ctx`: other packs may run in between."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, tick: Tensor, route: Route, exchange: Exchange) -> Tensor:
        ctx.route, ctx.exchange = route, exchange
        ctx.width, ctx.encoded_rows = features.shape[1], features.shape[0]
        shared = features.new_empty((route.rows, features.shape[1]))
        _swap(features, route.sends, shared, route.receives, route, exchange, FORTH)
        return shared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        route = ctx.route
        back = gradient.new_zeros((ctx.encoded_rows, ctx.width))
        _swap(gradient, route.receives, back, route.sends, route, ctx.exchange, BACK)
        return back, gradient.new_zeros(()) if ctx.needs_input_grad[1] else None, None, None


def _swap(
    given: Tensor,
    leaving: Mapping[int, Tensor],
    taken: Tensor,
    arriving: Mapping[int, Tensor],
    route: Route,
    exchange: Exchange,
    lane: int,
) -> None:
    """Rows of `given` to the members that need them, and theirs into rows of `taken`."""
    width, itemsize = given.shape[1], given.element_size()
    outgoing, incoming = {}, {}
    for member, rows in leaving.items():
        if member == exchange.member:
            taken[arriving[member].to(taken.device)] = given[rows.to(given.device)]
            continue
        message = Message.zeros((len(rows), width), given.dtype, given.device)
        torch.index_select(given, 0, rows.to(given.device), out=message.payload)
        outgoing[member] = message
    for member, rows in arriving.items():
        if member != exchange.member:
            incoming[member] = Message.zeros((len(rows), width), taken.dtype, taken.device)
    Swap(exchange, outgoing, incoming, route.most_rows * width * itemsize, lane).wait()
    for member, message in incoming.items():
        taken[arriving[member].to(taken.device)] = message.payload
