"""Attention as plain matrix products, some rows at a time: right on every device, and with capped scores.

The reference that other kernels are tested against, and what a device without a kernel of its own gets.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexcp.attention.merge import accumulator_dtype

_CHUNK_SCORES = 2**24  # held at a time, over all heads: 64 MiB in fp32, a few times over


class DenseKernel:
    """Forms the scores of some rows at a time, in fp64 for fp64 and in fp32 for everything narrower.

    Args:
        softcap: scores s become softcap · tanh(s / softcap); None leaves them.
    """

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=accumulator_dtype(q.dtype))
        for rows, keys in _chunks(q, k, causal):
            scores, _ = self._scores(q[rows], k[keys], rows.start if causal else None, scale)
            chunk_lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - chunk_lse.unsqueeze(-1))
            chunk_out = torch.einsum("hgqk,khd->qhgd", weights, v[keys].to(weights.dtype))
            out[rows] = chunk_out.flatten(1, 2).to(q.dtype)
            lse[rows] = chunk_lse.flatten(0, 1).transpose(0, 1)
        return out, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        dtype, kv_heads = accumulator_dtype(q.dtype), k.shape[1]
        dq = torch.empty_like(q)
        dk, dv = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
        for rows, keys in _chunks(q, k, causal):
            scores, slope = self._scores(q[rows], k[keys], rows.start if causal else None, scale)
            do_grouped = _grouped(do[rows].to(dtype), kv_heads)
            delta = (do_grouped * _grouped(out[rows].to(dtype), kv_heads)).sum(-1)
            weights = torch.exp(scores - _rows_last(_grouped(lse[rows].to(dtype), kv_heads)))
            dv[keys] += torch.einsum("hgqk,qhgd->khd", weights, do_grouped)
            dweights = torch.einsum("qhgd,khd->hgqk", do_grouped, v[keys].to(dtype))
            dscores = weights * (dweights - _rows_last(delta)) * scale
            if slope is not None:
                dscores *= slope
            chunk_dq = torch.einsum("hgqk,khd->qhgd", dscores, k[keys].to(dtype))
            dq[rows] = chunk_dq.flatten(1, 2).to(q.dtype)
            dk[keys] += torch.einsum("hgqk,qhgd->khd", dscores, _grouped(q[rows].to(dtype), kv_heads))
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _scores(
        self, q: Tensor, k: Tensor, first_row: int | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Scores [Hk, Hq/Hk, Tq, Tk] in the accumulator dtype, and the slope of the cap at each of them.

        Row i sees keys up to first_row + i, or all of them where that is None.
        """
        dtype = accumulator_dtype(q.dtype)
        scores = torch.einsum("qhgd,khd->hgqk", _grouped(q.to(dtype), k.shape[1]), k.to(dtype)) * scale
        slope = None
        if self._softcap is not None:
            capped = torch.tanh(scores / self._softcap)
            scores, slope = self._softcap * capped, 1.0 - capped * capped
        if first_row is not None:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(first_row + 1)
            scores.masked_fill_(hidden, float("-inf"))
        return scores, slope


def _chunks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows to do at a time, and the keys that any of them sees."""
    rows = max(1, _CHUNK_SCORES // (q.shape[1] * k.shape[0]))
    for start in range(0, q.shape[0], rows):
        stop = min(start + rows, q.shape[0])
        yield slice(start, stop), slice(0, stop if causal else k.shape[0])


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[T, Hq, ...] as [T, Hk, Hq/Hk, ...]."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _rows_last(x: Tensor) -> Tensor:
    """[Tq, Hk, Hq/Hk] as [Hk, Hq/Hk, Tq, 1], one number per row of the scores."""
    return x.permute(1, 2, 0).unsqueeze(-1)
