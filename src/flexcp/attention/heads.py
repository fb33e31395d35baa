"""All-to-all (Ulysses, arXiv 2309.14509): rows of cut samples are swapped for heads, and back.

During attention a member holds all cut rows for its share of the heads; whole samples stay where they are.
Where there are fewer key/value heads than members, each goes to several, and their gradients are added at
home. Shapes: T local rows, C cut rows of the pack, Hq query heads, Hk key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flexcp.attention.blocks import Backward, Gradients, forward_over
from flexcp.attention.exchange import BACK, FORTH, Exchange, Message, Swap
from flexcp.attention.kernels import Kernel
from flexcp.attention.masks import Tile, make_tiles, make_tiles_of_all
from flexcp.attention.merge import accumulator_dtype
from flexcp.attention.route import rows_by_sample
from flexcp.core.layout import Layout


class _Share(NamedTuple):
    """Heads of one member: query heads, and the key/value heads that they attend to."""

    q: slice
    kv: slice


def _share(heads: int, kv_heads: int, degree: int, member: int) -> _Share:
    """Member's heads.

    >>> [_share(8, 2, 4, member) for member in (0, 3)]
    [_Share(q=slice(0, 2, None), kv=slice(0, 1, None)), _Share(q=slice(6, 8, None), kv=slice(1, 2, None))]
    """
    first, kv_first = member * heads // degree, member * kv_heads // degree
    return _Share(
        slice(first, first + heads // degree), slice(kv_first, kv_first + max(1, kv_heads // degree))
    )


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
    """See `group.Method.forward`.

    Saves queries, keys, values, output and log-sum-exp [C, heads of this member, …], then those of the whole
    samples here, so that backward swaps no more than gradients.
    """
    cut, shares = layout.cut_rows(exchange.member), _shares(q, k, exchange.degree)
    swap = _to_heads(
        lambda s: torch.cat((q[:cut, s.q], k[:cut, s.kv], v[:cut, s.kv]), 1), q, shares, layout, exchange
    )
    whole = [x[cut:].contiguous() for x in (q, k, v)]  # a view would keep all rows alive
    tiles = _whole_tiles(layout, exchange.member)
    whole_out, whole_lse = forward_over(whole[0], [(tiles, whole[1], whole[2])], kernel, scale, sinks)
    mine = swap()
    share = shares[exchange.member]
    q_h, k_h, v_h = (x.contiguous() for x in torch.split(mine, _sizes(share), dim=1))
    sinks_h = sinks[share.q] if sinks is not None else None
    out_h, lse_h = forward_over(q_h, [(make_tiles_of_all(layout), k_h, v_h)], kernel, scale, sinks_h)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out[cut:] = whole_out

    def place(member: int, rows: Tensor) -> None:
        out[:cut, shares[member].q] = rows

    _to_rows(out_h, place, layout, exchange)
    return out, (q_h, k_h, v_h, out_h, lse_h, *whole, whole_out, whole_lse)


def backward(
    do: Tensor,
    saved: tuple[Tensor, ...],
    layout: Layout,
    exchange: Exchange,
    kernel: Kernel,
    scale: float,
    sinks: Tensor | None = None,
) -> Gradients:
    """See `group.Method.backward`."""
    q_h, k_h, v_h, out_h, lse_h, q_w, k_w, v_w, out_w, lse_w = saved
    cut, degree = layout.cut_rows(exchange.member), exchange.degree
    kv_heads = k_w.shape[1]
    shares = [_share(q_w.shape[1], kv_heads, degree, member) for member in range(degree)]
    swap = _to_heads(lambda s: do[:cut, s.q], do, shares, layout, exchange)
    tiles = _whole_tiles(layout, exchange.member)
    whole = Backward(do[cut:], q_w, out_w, lse_w, kernel, scale)
    dtype = accumulator_dtype(do.dtype)
    dkv = do.new_zeros(cut + k_w.shape[0], 2, kv_heads, do.shape[-1], dtype=dtype)
    whole.add((tiles, k_w, v_w), dkv[cut:])
    mine = Backward(swap(), q_h, out_h, lse_h, kernel, scale)
    dkv_h = k_h.new_zeros(k_h.shape[0], 2, *k_h.shape[1:], dtype=dtype)
    mine.add((make_tiles_of_all(layout), k_h, v_h), dkv_h)
    dq = torch.empty_like(do, memory_format=torch.contiguous_format)
    dq[cut:] = whole.dq.to(do.dtype)

    def place(member: int, rows: Tensor) -> None:
        dq_rows, dk_rows, dv_rows = torch.split(rows, _sizes(shares[member]), dim=1)
        dq[:cut, shares[member].q] = dq_rows
        dkv[:cut, 0, shares[member].kv] += dk_rows
        dkv[:cut, 1, shares[member].kv] += dv_rows

    grads = torch.cat((mine.dq, dkv_h[:, 0], dkv_h[:, 1]), dim=1).to(do.dtype)
    _to_rows(grads, place, layout, exchange)
    own = shares[exchange.member].q
    dsinks = whole.sinks(sinks)
    dsinks_h = mine.sinks(sinks[own] if sinks is not None else None)
    if dsinks is not None and dsinks_h is not None:
        dsinks[own] += dsinks_h
    return dq, dkv[:, 0].to(do.dtype), dkv[:, 1].to(do.dtype), dsinks


def _shares(q: Tensor, k: Tensor, degree: int) -> list[_Share]:
    return [_share(q.shape[1], k.shape[1], degree, member) for member in range(degree)]


def _sizes(share: _Share) -> list[int]:
    """Query, key and value heads, side by side in a message."""
    kv = share.kv.stop - share.kv.start
    return [share.q.stop - share.q.start, kv, kv]


def _whole_tiles(layout: Layout, member: int) -> tuple[Tile, ...]:
    """Tiles of the whole samples of a member, numbered without its cut rows."""
    cut = layout.cut_rows(member)
    tiles = [tile for tile in make_tiles(layout, member, member) if tile.q0 >= cut]
    return tuple(Tile(t.q0 - cut, t.q1 - cut, t.k0 - cut, t.k1 - cut, t.causal, t.turned) for t in tiles)


def _to_heads(
    rows_for: Callable[[_Share], Tensor],
    like: Tensor,
    shares: list[_Share],
    layout: Layout,
    exchange: Exchange,
) -> Callable[[], Tensor]:
    """Start to give every member its heads of the rows here; returns what waits for all [C, heads, D]."""
    member = exchange.member
    mine = rows_for(shares[member])
    cuts = [layout.cut_rows(m) for m in range(layout.degree)]
    outgoing: dict[int, Message] = {}
    incoming: dict[int, Message] = {}
    for other in range(layout.degree):
        if other == member:
            continue
        if cuts[member]:
            rows = rows_for(shares[other])
            outgoing[other] = _take("heads to", other, rows.shape, like, exchange)
            outgoing[other].payload.copy_(rows)
        if cuts[other]:
            shape = torch.Size((cuts[other], *mine.shape[1:]))
            incoming[other] = _take("heads of", other, shape, like, exchange)
    swap = Swap(exchange, outgoing, incoming, _largest_bytes(cuts, mine), FORTH)

    def arrived() -> Tensor:
        swap.wait()
        rows = rows_by_sample(layout, tuple(range(layout.degree)), like.device)
        whole = like.new_empty(sum(cuts), *mine.shape[1:])
        for m in range(layout.degree):
            if cuts[m]:
                whole.index_copy_(0, rows[m], mine if m == member else incoming[m].payload)
        return whole

    return arrived


def _to_rows(x: Tensor, place: Callable[[int, Tensor], None], layout: Layout, exchange: Exchange) -> None:
    """Give every member its rows of `x` [C, heads, D], and place what comes from each, in their order."""
    member = exchange.member
    cuts = [layout.cut_rows(m) for m in range(layout.degree)]
    rows = rows_by_sample(layout, tuple(range(layout.degree)), x.device)
    outgoing: dict[int, Message] = {}
    incoming: dict[int, Message] = {}
    for other in range(layout.degree):
        if other == member:
            continue
        if cuts[other]:
            shape = torch.Size((cuts[other], *x.shape[1:]))
            outgoing[other] = _take("rows to", other, shape, x, exchange)
            torch.index_select(x, 0, rows[other], out=outgoing[other].payload)
        if cuts[member]:
            shape = torch.Size((cuts[member], *x.shape[1:]))
            incoming[other] = _take("rows of", other, shape, x, exchange)
    Swap(exchange, outgoing, incoming, _largest_bytes(cuts, x), BACK).wait()
    for m in range(layout.degree):
        if cuts[member]:
            place(m, x[rows[m]] if m == member else incoming[m].payload)


def _largest_bytes(cuts: list[int], like: Tensor) -> int:
    """Of any message in the group; all members have equally many heads."""
    return max(cuts) * like.shape[1] * like.shape[2] * like.element_size()


def _take(name: str, other: int, shape: torch.Size, like: Tensor, exchange: Exchange) -> Message:
    return exchange.buffers.take(f"{name} {other}", shape, like.dtype, like.device)
