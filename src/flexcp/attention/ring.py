"""Ring: keys and values of every member pass by, one block under way while the one before is computed.

Shapes: T local rows, R rows of a block under way, Hq query heads, Hk key/value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from flexcp.attention.blocks import Backward, Block, Gradients, forward_over
from flexcp.attention.exchange import BACK, FORTH, Exchange, Message, Pending
from flexcp.attention.kernels import Kernel
from flexcp.attention.masks import Tile
from flexcp.attention.merge import accumulator_dtype
from flexcp.attention.route import Route, make_route
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
    blocks = _blocks(k, v, make_route(layout, exchange.member), exchange)
    out, lse = forward_over(q, blocks, kernel, scale, sinks)
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
    """See `group.Method.backward`.

    K and V travel as in the forward pass. The gradient of each block follows it in a lane of its own, one
    step behind: it sets out at the first member after the owner and is passed on while the next block is
    computed. The owner's own part stays at home. Half of it is computed while the first block is under way,
    the other half while the last gradient is.
    """
    q, k, v, out, lse = saved
    route = make_route(layout, exchange.member)
    dtype = accumulator_dtype(q.dtype)
    home = k.new_zeros(k.shape[0], 2, *k.shape[1:], dtype=dtype)  # dK and dV of the rows here
    sums = Backward(do, q, out, lse, kernel, scale)
    lane = _GradientLane(home, route, exchange)
    first, last = _halves(route.blocks[0].tiles) if len(route.blocks) > 1 else (route.blocks[0].tiles, ())
    for step, (tiles, block_k, block_v) in enumerate(_blocks(k, v, route, exchange)):
        if not step:
            sums.add((first, block_k, block_v), home)
            continue
        dkv = exchange.buffers.take(f"dkv {step % 2}", (block_k.shape[0], *home.shape[1:]), dtype, k.device)
        dkv.payload.zero_()
        sums.add((tiles, block_k, block_v), dkv.payload)
        lane.pass_on(dkv)
    sums.add((last, k, v), home)
    lane.bring_home()
    dk, dv = home.unbind(1)
    return sums.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sums.sinks(sinks)


@lru_cache(maxsize=4096)
def _halves(tiles: tuple[Tile, ...]) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """The same work in two parts: of a causal square the full square below the diagonal, and the rest.

    >>> [tile] = _halves((Tile(0, 4, 0, 4, causal=True),))[0]
    >>> tile
    Tile(q0=2, q1=4, k0=0, k1=2, causal=False, turned=False)
    """
    first: list[Tile] = []
    last: list[Tile] = []
    for tile in tiles:
        half = (tile.q1 - tile.q0) // 2
        if not tile.causal or tile.turned or not half:
            first.append(tile)
            continue
        row, key = tile.q0 + half, tile.k0 + half
        first.append(Tile(row, tile.q1, tile.k0, key, causal=False))
        last += Tile(tile.q0, row, tile.k0, key, causal=True), Tile(row, tile.q1, key, tile.k1, causal=True)
    return tuple(first), tuple(last)


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
    """Carries the gradient of each block to the next member, and in the end to its owner.

    Args:
        home: dK and dV [T, 2, Hk, D] of the rows here; what the others found is added to its cut rows.
    """

    def __init__(self, home: Tensor, route: Route, exchange: Exchange) -> None:
        self._home, self._route, self._exchange = home, route, exchange
        self._step = 0
        self._pending: Pending | None = None
        self._arriving: Message | None = None

    def pass_on(self, dkv: Message) -> None:
        """Add what earlier members found for this block to `dkv` [R, 2, Hk, D], and send the sum on."""
        if (arrived := self._wait()) is not None:
            dkv.payload.add_(arrived)
        self._step += 1
        blocks, route = self._route.blocks, self._route
        rows = blocks[(self._step + 1) % len(blocks)].rows  # behind the last block: its own
        shape, buffers = (rows, *dkv.payload.shape[1:]), self._exchange.buffers
        self._arriving = buffers.take("dkv in", shape, dkv.payload.dtype, dkv.payload.device)
        self._pending = self._exchange.post([(dkv, route.next)], [(self._arriving, route.previous)], BACK)

    def bring_home(self) -> None:
        """Add the sum of the others to the gradient at home."""
        if (arrived := self._wait()) is not None:
            self._home[: len(arrived)] += arrived

    def _wait(self) -> Tensor | None:
        """What the last hop posted has brought; None before the first."""
        if self._pending is None or self._arriving is None:
            return None
        self._pending.wait()
        self._pending = None
        return self._arriving.payload
