"""Attention over the pack of one group: exact, any degree, any lengths, no padding, by any exchange.

The autograd function and what it refuses. How members meet is in `ring`, `gather` and `heads`, what is
attended in `masks`, the arithmetic of a tile in `kernels`. Shapes: T local rows, Hq query heads, Hk key/value
heads, D width of a head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexcp.attention import gather, ring
from flexcp.attention import heads as all_to_all
from flexcp.attention.blocks import Gradients
from flexcp.attention.exchange import Exchange
from flexcp.attention.kernels import Kernel, kernel_for
from flexcp.core.errors import InputError, UnsupportedError
from flexcp.core.layout import Layout, heads_divide, windowed
from flexcp.core.plan import ExchangeKind


class Method(Protocol):
    """One way to meet: a module with these two functions."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        exchange: Exchange,
        kernel: Kernel,
        scale: float,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output [T, Hq, D] in q's dtype, and what backward needs."""
        ...

    def backward(
        self,
        do: Tensor,
        saved: tuple[Tensor, ...],
        layout: Layout,
        exchange: Exchange,
        kernel: Kernel,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Gradients:
        """Gradients dq [T, Hq, D], dk and dv [T, Hk, D] in the dtype of the inputs, and of the sinks [Hq].

        The sinks' are of the rows that this member computed; over the group they add up.
        """
        ...


_METHODS: dict[ExchangeKind, Method] = {"ring": ring, "gather": gather, "all-to-all": all_to_all}


def group_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    exchange: Exchange,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attend within every sample of a pack, whose rows lie across the members of a group.

    Every member of the group must call it, and must run its backward if any member does, also a member
    without rows: others wait for what it sends. Calls of several layers may be in flight; those of one
    process run one after the other.

    Args:
        q: queries [T, Hq, D] of this member, rows in layout order.
        k: keys [T, Hk, D]; Hk divides Hq.
        v: values [T, Hk, D].
        layout: where every row of the pack lies; the same on all members.
        exchange: the way to the other members, of the same kind on all of them.
        scale: factor on the scores, by default D ** -0.5.
        window: rows that a row sees, itself the last of them; None for all before it.
        softcap: scores s become softcap · tanh(s / softcap).
        sinks: one more score for every row, whose value is zero [Hq]. Its gradient is that of this member's
            rows; that of a parameter comes out of the sum over all ranks.
        kernel: what computes a tile, by default the one for q's device and the softcap.

    Returns:
        [T, Hq, D] in the dtype of q.

    Raises:
        InputError: shapes, dtypes or the group do not fit the layout.
        UnsupportedError: the group exchanges heads that cannot be dealt out to it.
    """
    _check(q, k, v, layout, exchange)
    if kernel is not None and softcap is not None:
        raise InputError("a kernel and a softcap are both given", "Give a kernel that caps, or the softcap.")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise InputError(
            f"there are {tuple(sinks.shape)} sinks for {q.shape[1]} query heads", "Give one a head."
        )
    kernel = kernel or kernel_for(q.device, q.dtype, q.shape[-1], softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    layout = layout if window is None else windowed(layout, window)
    out: Tensor = _GroupAttention.apply(q, k, v, layout, exchange, kernel, scale, sinks)  # type: ignore[no-untyped-call]
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, layout: Layout, exchange: Exchange) -> None:
    if exchange.degree != layout.degree:
        raise InputError(
            f"the group has {exchange.degree} members, the layout is for {layout.degree}",
            "Take both from the same task.",
        )
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2] or not q.shape[2]:
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
    if exchange.kind == "all-to-all" and not heads_divide(q.shape[1], k.shape[1], exchange.degree):
        heads = f"{q.shape[1]} query and {k.shape[1]} key/value heads"
        raise UnsupportedError(
            f"{heads} cannot be dealt out to {exchange.degree} ranks",
            "Plan with the heads of this very model; rings and gathers run at any degree.",
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise InputError(f"q, k and v differ: {kinds}", "They share one dtype and one device.")


class _GroupAttention(torch.autograd.Function):
    """Everything that backward needs lives in `ctx`, so that layers and recomputation do not mix."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        exchange: Exchange,
        kernel: Kernel,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        inputs = (_rowwise(q), _rowwise(k), _rowwise(v))
        # Kernels choose their own dtypes; autocast would round the scores of those that form them.
        with torch.autocast(q.device.type, enabled=False):
            out, saved = _METHODS[exchange.kind].forward(*inputs, layout, exchange, kernel, scale, sinks)
        ctx.save_for_backward(sinks, *saved)
        ctx.layout, ctx.exchange, ctx.kernel, ctx.scale = layout, exchange, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        # Members may not differ in the messages they send, so all of it runs whatever needs a gradient.
        method = _METHODS[ctx.exchange.kind]
        sinks, *saved = ctx.saved_tensors
        grads = method.backward(
            _rowwise(do), tuple(saved), ctx.layout, ctx.exchange, ctx.kernel, ctx.scale, sinks
        )
        wanted = zip(grads[:3], ctx.needs_input_grad, strict=False)
        return (*(grad if needed else None for grad, needed in wanted), None, None, None, None, grads[3])


def _rowwise(x: Tensor) -> Tensor:
    """Kernels take any strides but want the last axis contiguous, which projections give for free."""
    return x if x.stride(-1) == 1 else x.contiguous()
