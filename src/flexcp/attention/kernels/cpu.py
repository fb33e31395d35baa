"""Blocked attention on CPU by torch's own kernel, a tile a call."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.attention.kernels.schema import mismatch

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = f"{_FORWARD}_backward"


def why_not() -> str:
    """What is missing in this torch; empty where nothing is."""
    inputs = ["query Tensor", "key Tensor", "value Tensor"]
    options = ["dropout_p float", "is_causal bool"]
    backward = ["grad_out Tensor", *inputs, "out Tensor", "logsumexp Tensor", *options]
    return mismatch(_FORWARD, [*inputs, *options], ["scale"], ["Tensor"] * 2) or mismatch(
        _BACKWARD, backward, ["scale"], ["Tensor"] * 3
    )


class CpuKernel:
    """Never forms the score matrix; skips the masked half of a causal square; any head width."""

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""
        return device.type == "cpu"

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
