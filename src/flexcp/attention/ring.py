"""Ring: keys and values of every member pass by, one block under way while the one before is computed.

Shapes: T local rows, R rows of a block under way, Hq query heads, Hk key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexcp.attention.blocks import Backward, Block, forward_over
from flexcp.attention.exchange import BACK, FORTH, Exchange, Message, Pending
from flexcp.attention.kernels import Kernel
from flexcp.attention.merge import accumulator_dtype
from flexcp.attention.route import Route, make_route
from flexcp.core.layout import Layout


def forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, exchange: Exchange, kernel: Kernel, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `group.Method.forward`; saves q, k, v, out and the log-sum-exp [T, Hq]."""
    blocks = _blocks(k, v, make_route(layout, exchange.member), exchange)
    out, lse = forward_over(q, blocks, kernel, scale)
    return out, (q, k, v, out, lse)


def backward(
    do: Tensor, saved: tuple[Tensor, ...], layout: Layout, exchange: Exchange, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `group.Method.backward`.

    K and V travel as in the forward pass. The gradient of each block follows it in a lane of its own, one
    step behind: it is passed on while the next block is computed, and its last hop brings it home.
    """
    q, k, v, out, lse = saved
    route = make_route(layout, exchange.member)
    dtype = accumulator_dtype(q.dtype)
    home = Message.zeros((k.shape[0], 2, *k.shape[1:]), dtype, k.device)  # dK and dV of the rows here
    sums = Backward(do, q, out, lse, kernel, scale)
    lane = _GradientLane(home, route, exchange)
    for step, block in enumerate(_blocks(k, v, route, exchange)):
        dkv = home
        if step:
            shape = (block[1].shape[0], *home.payload.shape[1:])
            dkv = exchange.buffers.take(f"dkv {step % 2}", shape, dtype, k.device)
            dkv.payload.zero_()
        sums.add(block, dkv.payload)
        lane.pass_on(dkv)
    lane.wait()
    dk, dv = home.payload.unbind(1)
    return sums.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(k: Tensor, v: Tensor, route: Route, exchange: Exchange) -> Iterator[Block]:
    """Every block in turn; the next one is under way meanwhile.

    The first block is all T rows here. Only its cut rows travel, K and V of a row side by side.
    """
    tiles = route.blocks[0].tiles
    if len(route.blocks) == 1:
        yield tiles, k, v
        return
    cut = route.blocks[0].rows
    block = exchange.buffers.take("kv 0", (cut, 2, *k.shape[1:]), k.dtype, k.device)
    torch.stack((k[:cut], v[:cut]), dim=1, out=block.payload)
    for step, following in enumerate(route.blocks[1:], 1):
        shape = (following.rows, 2, *k.shape[1:])
        arriving = exchange.buffers.take(f"kv {step % 2}", shape, k.dtype, k.device)
        pending = exchange.post([(block, route.next)], [(arriving, route.previous)], FORTH)
        yield tiles, k, v
        pending.wait()
        block, tiles = arriving, following.tiles
        k, v = block.payload.unbind(1)
    yield tiles, k, v


class _GradientLane:
    """Carries the gradient of each block to the next member, and this member's own back home.

    Args:
        home: dK and dV [T, 2, Hk, D] of the rows here. Its cut rows leave on the first hop and are
            overwritten by the complete sum on the last.
    """

    def __init__(self, home: Message, route: Route, exchange: Exchange) -> None:
        self._home, self._route, self._exchange = home, route, exchange
        self._step = 0
        self._pending: Pending | None = None
        self._arriving = home

    def pass_on(self, dkv: Message) -> None:
        """Add what earlier members found for this block to `dkv` [R, 2, Hk, D], and send the sum on."""
        blocks = self._route.blocks
        if len(blocks) == 1:
            return
        if self._step:
            self.wait()
            dkv.payload.add_(self._arriving.payload)
        leaving = dkv.rows(blocks[self._step].rows)
        self._step += 1
        if self._step < len(blocks):
            shape = (blocks[self._step].rows, *dkv.payload.shape[1:])
            dtype, device = dkv.payload.dtype, dkv.payload.device
            self._arriving = self._exchange.buffers.take("dkv in", shape, dtype, device)
        else:
            self._arriving = self._home.rows(blocks[0].rows)
        route = self._route
        self._pending = self._exchange.post([(leaving, route.next)], [(self._arriving, route.previous)], BACK)

    def wait(self) -> None:
        """Return when the last hop posted is complete."""
        if self._pending:
            self._pending.wait()
            self._pending = None
