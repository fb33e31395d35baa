"""Gather: keys and values of all other members come at once, and their gradients go straight home.

One exchange a pass and few, large tiles, for room: keys and values of all cut rows of the pack, for one layer
at a time. Shapes: T local rows, R cut rows of all other members, Hq query heads, Hk key/value heads, D width
of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexcp.attention.blocks import Backward, Block, Gradients, forward_over
from flexcp.attention.exchange import BACK, FORTH, Exchange, Message, Swap
from flexcp.attention.kernels import Kernel
from flexcp.attention.masks import make_tiles, make_tiles_of_many
from flexcp.attention.merge import accumulator_dtype
from flexcp.attention.route import rows_by_sample
from flexcp.core.layout import Layout


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    exchange: Exchange,
    kernel: Kernel,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `group.Method.forward`; saves q, k, v, out and the log-sum-exp [T, Hq]."""
    out, lse = forward_over(q, _blocks(k, v, layout, exchange), kernel, scale, sinks)
    return out, (q, k, v, out, lse)


def backward(
    do: Tensor,
    saved: tuple[Tensor, ...],
    layout: Layout,
    exchange: Exchange,
    kernel: Kernel,
    scale: float,
    sinks: Tensor | None = None,
) -> Gradients:
    """See `group.Method.backward`. K and V are gathered anew, so no layer holds those of others."""
    q, k, v, out, lse = saved
    sums = Backward(do, q, out, lse, kernel, scale)
    home = k.new_zeros(k.shape[0], 2, *k.shape[1:], dtype=accumulator_dtype(q.dtype))
    for number, block in enumerate(_blocks(k, v, layout, exchange)):
        if number == 0:
            sums.add(block, home)
        else:
            dkv = home.new_zeros(block[1].shape[0], *home.shape[1:])
            sums.add(block, dkv)
            _bring_home(dkv, home, layout, exchange)
    return sums.dq.to(q.dtype), home[:, 0].to(k.dtype), home[:, 1].to(v.dtype), sums.sinks(sinks)


def _others(layout: Layout, member: int) -> tuple[int, ...]:
    """Members with cut rows to give, if this one has any to ask with."""
    if not layout.cut_rows(member):
        return ()
    return tuple(m for m in range(layout.degree) if m != member and layout.cut_rows(m))


def _largest_bytes(layout: Layout, row: Tensor) -> int:
    return max(map(layout.cut_rows, range(layout.degree))) * row.numel() * row.element_size()


def _blocks(k: Tensor, v: Tensor, layout: Layout, exchange: Exchange) -> Iterator[Block]:
    """The rows here while the others are under way; then all others, sample by sample."""
    member = exchange.member
    others = _others(layout, member)
    own = make_tiles(layout, member, member)
    if not others:
        yield own, k, v
        return
    cut = layout.cut_rows(member)
    mine = exchange.buffers.take("kv 0", (cut, 2, *k.shape[1:]), k.dtype, k.device)
    torch.stack((k[:cut], v[:cut]), dim=1, out=mine.payload)
    incoming = _messages("kv", others, layout, exchange, mine.payload)
    swap = Swap(
        exchange, dict.fromkeys(others, mine), incoming, _largest_bytes(layout, mine.payload[0]), FORTH
    )
    yield own, k, v
    swap.wait()
    rows = rows_by_sample(layout, others, k.device)
    shape = (sum(map(len, rows.values())), *mine.payload.shape[1:])
    block = exchange.buffers.take("kv 1", shape, k.dtype, k.device).payload
    for other in others:
        block.index_copy_(0, rows[other], incoming[other].payload)
    keys, values = block.unbind(1)
    yield make_tiles_of_many(layout, member, others), keys, values


def _messages(
    name: str, others: tuple[int, ...], layout: Layout, exchange: Exchange, like: Tensor
) -> dict[int, Message]:
    """One message for the cut rows of each of the others."""
    return {
        other: exchange.buffers.take(
            f"{name} of {other}", (layout.cut_rows(other), *like.shape[1:]), like.dtype, like.device
        )
        for other in others
    }


def _bring_home(dkv: Tensor, home: Tensor, layout: Layout, exchange: Exchange) -> None:
    """Send dK and dV of the others [R, 2, Hk, D] to their owners; add theirs to `home`, in their order."""
    others = _others(layout, exchange.member)
    rows = rows_by_sample(layout, others, dkv.device)
    outgoing = _messages("dkv to", others, layout, exchange, dkv)
    for other in others:
        torch.index_select(dkv, 0, rows[other], out=outgoing[other].payload)
    cut = layout.cut_rows(exchange.member)
    shape = (cut, *dkv.shape[1:])
    incoming = {
        other: exchange.buffers.take(f"dkv from {other}", shape, dkv.dtype, dkv.device) for other in others
    }
    Swap(exchange, outgoing, incoming, _largest_bytes(layout, dkv[0]), BACK).wait()
    for other in others:
        home[:cut] += incoming[other].payload
