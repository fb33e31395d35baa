"""Blocked attention on CPU by torch's own kernel; the only file that names private operators of torch."""

from __future__ import annotations

import torch
from torch import Tensor

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"


def is_available() -> bool:
    """Whether this torch has both operators."""
    return hasattr(torch.ops.aten, _FORWARD) and hasattr(torch.ops.aten, _BACKWARD)


class CpuKernel:
    """Never forms the score matrix; skips the masked half of a causal square; any head width."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        run = getattr(torch.ops.aten, _FORWARD)
        out, lse = run(_heads_first(q), _heads_first(k), _heads_first(v), 0.0, causal, scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

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
        run = getattr(torch.ops.aten, _BACKWARD)
        tensors = [_heads_first(x) for x in (do, q, k, v, out, lse)]
        dq, dk, dv = run(*tensors, 0.0, causal, scale=scale)
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, ...] as the view [1, H, T, ...]; no copy."""
    return x.transpose(0, 1).unsqueeze(0)
