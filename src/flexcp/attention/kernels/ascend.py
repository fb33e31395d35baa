"""Attention on Ascend by torch_npu's fused operators: many sequences a call, lengths on the host. UNTESTED.

Nothing here has run on such a device. Written from the signatures that torch_npu documents for
`npu_fusion_attention` and `npu_fusion_attention_grad` (layout TND): the softmax statistics are fp32
[T, Hq, 8], eight copies of a number; the gradient needs only that maximum + log(sum) is the log-sum-exp, so
that is given as the maximum, with a sum of 1. The causal mask is the fixed 2048 x 2048 one, aligned at the
bottom right.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexcp.attention.calls import Bounds
from flexcp.attention.kernels.packed import PackedKernel

_COPIES = 8
_MASK_ROWS = 2048
_NO_MASK, _RIGHT_DOWN_CAUSAL = 0, 3  # sparse_mode


def why_not() -> str:
    """What is missing; empty where nothing is."""
    return "" if importlib.util.find_spec("torch_npu") else "torch_npu is not installed"


class AscendKernel(PackedKernel):
    """Never forms scores, knows grouped heads."""

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""
        return device.type == "npu" and dtype in (torch.float16, torch.bfloat16)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `PackedKernel.forward_packed`."""
        out, maxima, sums, *_ = _torch_npu().npu_fusion_attention(
            q, k, v, q.shape[1], "TND", scale=scale, keep_prob=1.0, **_options(bounds, causal, q.device)
        )
        return out, maxima[..., 0] + torch.log(sums[..., 0])

    def backward_packed(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Bounds,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `PackedKernel.backward_packed`."""
        maxima = lse.unsqueeze(-1).expand(*lse.shape, _COPIES).contiguous()
        dq, dk, dv, *_ = _torch_npu().npu_fusion_attention_grad(
            q,
            k,
            v,
            do,
            q.shape[1],
            "TND",
            softmax_max=maxima,
            softmax_sum=torch.ones_like(maxima),
            attention_in=out,
            scale_value=scale,
            keep_prob=1.0,
            **_options(bounds, causal, q.device),
        )
        return dq, dk, dv


def _options(bounds: Bounds, causal: bool, device: torch.device) -> dict[str, Any]:
    """Sequences and mask, as both operators take them."""
    return {
        "actual_seq_qlen": list(bounds.q_stops),
        "actual_seq_kvlen": list(bounds.k_stops),
        "sparse_mode": _RIGHT_DOWN_CAUSAL if causal else _NO_MASK,
        "atten_mask": _hidden(device) if causal else None,
    }


@lru_cache(maxsize=16)
def _hidden(device: torch.device) -> Tensor:
    """True where a row does not see a key."""
    return torch.ones(_MASK_ROWS, _MASK_ROWS, dtype=torch.bool, device=device).triu(1)


def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")
