"""Ring attention over the pack of one group: exact, any degree, any lengths, no padding.

The order of messages and the autograd function; what is attended is in `masks`, who is whose neighbour in
`route`, the arithmetic of a tile in `kernels`. Shapes: T local rows, C <= T of them cut, R rows of a block
under way, Hq query heads, Hk key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexcp.attention.exchange import Exchange, Pending
from flexcp.attention.kernels import Kernel, kernel_for
from flexcp.attention.masks import Tile
from flexcp.attention.merge import accumulator_dtype, merge_
from flexcp.attention.route import Route, make_route
from flexcp.core.errors import InputError
from flexcp.core.layout import Layout


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    exchange: Exchange,
    *,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attend within every sample of a pack, whose rows lie across the members of a group.

    Every member of the group must call it, and must run its backward if any member does, also a member
    without rows: others wait for what it sends. Calls of several layers may be in flight.

    Args:
        q: queries [T, Hq, D] of this member, rows in layout order.
        k: keys [T, Hk, D]; Hk divides Hq.
        v: values [T, Hk, D].
        layout: where every row of the pack lies; the same on all members.
        exchange: the way to the other members.
        scale: factor on the scores, by default D ** -0.5.
        kernel: what computes a tile, by default the one for q's device.

    Returns:
        [T, Hq, D] in the dtype of q.

    Raises:
        InputError: shapes, dtypes or the group do not fit the layout.
    """
    _check(q, k, v, layout, exchange)
    kernel = kernel or kernel_for(q.device, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    route = make_route(layout, exchange.member)
    out: Tensor = _RingAttention.apply(q, k, v, route, exchange, kernel, scale)  # type: ignore[no-untyped-call]
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, layout: Layout, exchange: Exchange) -> None:
    if exchange.degree != layout.degree:
        raise InputError(
            f"the group has {exchange.degree} members, the layout is for {layout.degree}",
            "Take both from the same task.",
        )
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise InputError(f"{shapes} do not fit together", "They are [T, Hq, D], [T, Hk, D], [T, Hk, D].")
    rows = layout.rows(exchange.member)
    if q.shape[0] != rows or k.shape[0] != rows:
        raise InputError(
            f"member {exchange.member} gave {q.shape[0]} rows of q and {k.shape[0]} of k and v; "
            f"the layout places {rows} rows there",
            "Give the rows of the layout, in its order, without padding.",
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise InputError(
            f"{q.shape[1]} query heads do not divide among {k.shape[1]} key/value heads",
            "The number of query heads is a multiple of that of the key/value heads.",
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise InputError(f"q, k and v differ: {kinds}", "They share one dtype and one device.")


class _RingAttention(torch.autograd.Function):
    """Everything that backward needs lives in `ctx`, so that layers and recomputation do not mix."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        route: Route,
        exchange: Exchange,
        kernel: Kernel,
        scale: float,
    ) -> Tensor:
        q, k, v = _rowwise(q), _rowwise(k), _rowwise(v)
        out, lse = ring_forward(q, k, v, route, exchange, kernel, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.route, ctx.exchange, ctx.kernel, ctx.scale = route, exchange, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        # Members may not differ in the messages they send, so the whole ring runs whatever needs a gradient.
        q, k, v, out, lse = ctx.saved_tensors
        grads = ring_backward(_rowwise(do), q, k, v, out, lse, ctx.route, ctx.exchange, ctx.kernel, ctx.scale)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(grad if needed else None for grad, needed in wanted), None, None, None, None)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, route: Route, exchange: Exchange, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] in q's dtype and its log-sum-exp [T, Hq] in fp32 (fp64 for fp64)."""
    dtype = accumulator_dtype(q.dtype)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
    for tiles, block_k, block_v in _blocks(k, v, route, exchange):
        for q0, q1, k0, k1, causal in tiles:
            tile = kernel.forward(q[q0:q1], block_k[k0:k1], block_v[k0:k1], causal, scale)
            merge_(out[q0:q1], lse[q0:q1], *tile)
    return out.to(q.dtype), lse


def ring_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    route: Route,
    exchange: Exchange,
    kernel: Kernel,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq [T, Hq, D], dk and dv [T, Hk, D] in the dtype of the inputs.

    K and V travel as in the forward pass. The gradient of each block follows it, one step behind: it is
    passed on while the next block is computed, and its last hop brings it home to the owner.
    """
    dtype = accumulator_dtype(q.dtype)
    dq = q.new_zeros(q.shape, dtype=dtype)
    home = k.new_zeros(k.shape[0], 2, *k.shape[1:], dtype=dtype)  # dK and dV of the rows here
    lane = _GradientLane(home, route, exchange)
    for step, (tiles, block_k, block_v) in enumerate(_blocks(k, v, route, exchange)):
        dkv = home if step == 0 else home.new_zeros(block_k.shape[0], *home.shape[1:])
        for q0, q1, k0, k1, causal in tiles:
            rows, keys = slice(q0, q1), slice(k0, k1)
            tile_dq, tile_dk, tile_dv = kernel.backward(
                do[rows], q[rows], block_k[keys], block_v[keys], out[rows], lse[rows], causal, scale
            )
            dq[rows] += tile_dq
            dkv[keys, 0] += tile_dk
            dkv[keys, 1] += tile_dv
        lane.pass_on(dkv)
    lane.wait()
    return dq.to(q.dtype), home[:, 0].to(k.dtype), home[:, 1].to(v.dtype)


def _blocks(
    k: Tensor, v: Tensor, route: Route, exchange: Exchange
) -> Iterator[tuple[tuple[Tile, ...], Tensor, Tensor]]:
    """Every block in turn, with its tiles, K and V [R, Hk, D]; the next one is under way meanwhile.

    The first block is all T rows here. Only its cut rows travel, K and V of a row side by side.
    """
    tiles = route.blocks[0].tiles
    if len(route.blocks) == 1:
        yield tiles, k, v
        return
    cut = route.blocks[0].rows
    block = torch.stack((k[:cut], v[:cut]), dim=1)
    for following in route.blocks[1:]:
        arriving = block.new_empty(following.rows, *block.shape[1:])
        pending = exchange.post([(block, route.next)], [(arriving, route.previous)])
        yield tiles, k, v
        pending.wait()
        block, tiles = arriving, following.tiles
        k, v = block.unbind(1)
    yield tiles, k, v


class _GradientLane:
    """Carries the gradient of each block to the next member, and this member's own back home.

    Args:
        home: dK and dV [T, 2, Hk, D] of the rows here. Its cut rows leave on the first hop and are
            overwritten by the complete sum on the last.
    """

    def __init__(self, home: Tensor, route: Route, exchange: Exchange) -> None:
        self._home, self._route, self._exchange = home, route, exchange
        self._step = 0
        self._pending: Pending | None = None
        self._leaving = self._arriving = home[:0]

    def pass_on(self, dkv: Tensor) -> None:
        """Add what earlier members found for this block to `dkv` [R, 2, Hk, D], and send the sum on."""
        blocks = self._route.blocks
        if len(blocks) == 1:
            return
        if self._step:
            self.wait()
            dkv += self._arriving
        self._leaving = dkv[: blocks[self._step].rows]
        self._step += 1
        if self._step < len(blocks):
            self._arriving = dkv.new_empty(blocks[self._step].rows, *dkv.shape[1:])
        else:
            self._arriving = self._home[: blocks[0].rows]
        sends, receives = [(self._leaving, self._route.next)], [(self._arriving, self._route.previous)]
        self._pending = self._exchange.post(sends, receives)

    def wait(self) -> None:
        """Return when the last hop posted is complete."""
        if self._pending:
            self._pending.wait()
            self._pending = None


def _rowwise(x: Tensor) -> Tensor:
    """Kernels take any strides but want the last axis contiguous, which projections give for free."""
    return x if x.stride(-1) == 1 else x.contiguous()
