"""Attention as plain matrix products: right on every device, O(Tq x Tk) memory.

The reference that other kernels are tested against, and what a device without a kernel of its own gets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.attention.merge import accumulator_dtype


class DenseKernel:
    """Forms the whole score matrix, in fp64 for fp64 and in fp32 for everything narrower."""

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        scores = _scores(q, k, causal, scale)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        out = torch.einsum("hgqk,khd->qhgd", weights, v.to(weights.dtype))
        return out.flatten(1, 2).to(q.dtype), lse.flatten(0, 1).transpose(0, 1)

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
        scores = _scores(q, k, causal, scale)
        dtype, kv_heads = scores.dtype, k.shape[1]
        do_grouped = _grouped(do.to(dtype), kv_heads)
        delta = (do_grouped * _grouped(out.to(dtype), kv_heads)).sum(-1)
        weights = torch.exp(scores - _rows_last(_grouped(lse.to(dtype), kv_heads)))
        dv = torch.einsum("hgqk,qhgd->khd", weights, do_grouped)
        dweights = torch.einsum("qhgd,khd->hgqk", do_grouped, v.to(dtype))
        dscores = weights * (dweights - _rows_last(delta)) * scale
        dq = torch.einsum("hgqk,khd->qhgd", dscores, k.to(dtype)).flatten(1, 2)
        dk = torch.einsum("hgqk,qhgd->khd", dscores, _grouped(q.to(dtype), kv_heads))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled, masked scores [Hk, Hq/Hk, Tq, Tk] in the accumulator dtype."""
    dtype = accumulator_dtype(q.dtype)
    scores = torch.einsum("qhgd,khd->hgqk", _grouped(q.to(dtype), k.shape[1]), k.to(dtype)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[T, Hq, ...] as [T, Hk, Hq/Hk, ...]."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:])


def _rows_last(x: Tensor) -> Tensor:
    """[Tq, Hk, Hq/Hk] as [Hk, Hq/Hk, Tq, 1], one number per row of the scores."""
    return x.permute(1, 2, 0).unsqueeze(-1)
