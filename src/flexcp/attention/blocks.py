"""Attention of local queries to blocks of keys, one after the other; sums in fp32 (fp64 for fp64)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flexcp.attention.calls import Call, Rows, add_, one_by_one, take, together
from flexcp.attention.kernels import Kernel, PackedKernel
from flexcp.attention.masks import Tile
from flexcp.attention.merge import accumulator_dtype, merge_

# What the queries attend to in a block, its keys and its values [R, Hk, D].
Block = tuple[Sequence[Tile], Tensor, Tensor]

# dq [T, Hq, D], dk and dv [T, Hk, D] in the dtype of the inputs, and of the sinks [Hq] if there are any.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward_over(
    q: Tensor, blocks: Iterable[Block], kernel: Kernel, scale: float, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] in q's dtype and its log-sum-exp [T, Hq] in the accumulator dtype.

    A sink [Hq] is one more score of every row, of a key whose value is zero: it comes once, in the end.
    """
    sums = _Outputs(q)
    for tiles, block_k, block_v in blocks:
        for call in _calls(kernel, tiles, q.device):
            inputs = take(q, call.q), take(block_k, call.k), take(block_v, call.k)
            if isinstance(kernel, PackedKernel) and call.bounds is not None:
                part = kernel.forward_packed(*inputs, call.bounds, call.causal, scale)
            else:
                part = kernel.forward(*inputs, call.causal, scale)
            sums.add(call, *part)
    if sinks is not None:
        sums.add_sinks(sinks)
    return sums.total()


def _calls(kernel: Kernel, tiles: Sequence[Tile], device: torch.device) -> Sequence[Call]:
    return (together if isinstance(kernel, PackedKernel) else one_by_one)(tuple(tiles), device)


def _is_all(rows: Rows, x: Tensor) -> bool:
    return isinstance(rows, slice) and (rows.start, rows.stop) == (0, len(x))


class _Outputs:
    """Outputs and log-sum-exps of the calls so far. The first that has all rows is taken as it is."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._dtype = accumulator_dtype(q.dtype)
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, call: Call, out: Tensor, lse: Tensor) -> None:
        if self._sums is None and _is_all(call.q, self._q):
            self._sums = out, lse.to(self._dtype)
            return
        total, total_lse = self._widened()
        if isinstance(call.q, slice):
            merge_(total[call.q], total_lse[call.q], out, lse)
            return
        part, part_lse = total.index_select(0, call.q), total_lse.index_select(0, call.q)
        merge_(part, part_lse, out, lse)
        total.index_copy_(0, call.q, part)
        total_lse.index_copy_(0, call.q, part_lse)

    def add_sinks(self, sinks: Tensor) -> None:
        total, total_lse = self._widened()
        merge_(total, total_lse, total.new_zeros(()), sinks.to(self._dtype).expand_as(total_lse))

    def _widened(self) -> tuple[Tensor, Tensor]:
        """The sums so far, to add to."""
        total, total_lse = self._sums or self._untouched()
        self._sums = total.to(self._dtype), total_lse
        return self._sums

    def total(self) -> tuple[Tensor, Tensor]:
        out, lse = self._sums or self._untouched()
        return out.to(self._q.dtype), lse

    def _untouched(self) -> tuple[Tensor, Tensor]:
        rows, heads = self._q.shape[:2]
        out = self._q.new_zeros(self._q.shape, dtype=self._dtype)
        lse = self._q.new_full((heads, rows), float("-inf"), dtype=self._dtype)
        return out, lse.transpose(0, 1)  # as kernels want it: the rows of a head side by side


class Backward:
    """Backward of `forward_over`: one call for each block.

    Args:
        do: gradient of the output [T, Hq, D].
        q: queries [T, Hq, D].
        out: output [T, Hq, D].
        lse: log-sum-exp over all keys, and the sink, [T, Hq].
        kernel: what computes a tile.
        scale: factor on the scores.
    """

    def __init__(self, do: Tensor, q: Tensor, out: Tensor, lse: Tensor, kernel: Kernel, scale: float) -> None:
        self._do, self._q, self._out, self._lse = do, q, out, lse
        self._kernel, self._scale = kernel, scale
        self._dq: Tensor | None = None

    @property
    def dq(self) -> Tensor:
        """Sum so far [T, Hq, D]."""
        return self._sum() if self._dq is None else self._dq

    def add(self, block: Block, dkv: Tensor) -> None:
        """Add to `dq`, and to dK and dV of the block, `dkv` [R, 2, Hk, D]."""
        tiles, block_k, block_v = block
        for call in _calls(self._kernel, tiles, self._q.device):
            dq, dk, dv = self._run(call, block_k, block_v)
            if self._dq is None and _is_all(call.q, self._q):
                self._dq = dq
            else:
                self._dq = self._sum()
                add_(self._dq, call.q, dq)
            add_(dkv[:, 0], call.k, dk)
            add_(dkv[:, 1], call.k, dv)

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Gradient of the sinks [Hq], in their dtype.

        A sink has the weight exp(sink - lse) and the value 0, so its score has the gradient
        weight · (0 - do · out), as every score has weight · (do · value - do · out).
        """
        if sinks is None:
            return None
        dtype = accumulator_dtype(self._q.dtype)
        delta = (self._do.to(dtype) * self._out.to(dtype)).sum(-1)
        return -(torch.exp(sinks.to(dtype) - self._lse.to(dtype)) * delta).sum(0).to(sinks.dtype)

    def _sum(self) -> Tensor:
        dtype = accumulator_dtype(self._q.dtype)
        return self._q.new_zeros(self._q.shape, dtype=dtype) if self._dq is None else self._dq.to(dtype)

    def _run(self, call: Call, block_k: Tensor, block_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        do, q, out, lse = (take(x, call.q) for x in (self._do, self._q, self._out, self._lse))
        tensors = do, q, take(block_k, call.k), take(block_v, call.k), out, lse
        if isinstance(self._kernel, PackedKernel) and call.bounds is not None:
            return self._kernel.backward_packed(*tensors, call.bounds, call.causal, self._scale)
        return self._kernel.backward(*tensors, call.causal, self._scale)
