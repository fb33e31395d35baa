"""Memory-efficient attention on CUDA by torch's own operators: fp32, and heads too wide for flash.

Called below autograd, like flash, a tile a call. Read in torch's source
(aten/src/ATen/native/transformers/cuda/attention_backward.cu and mem_eff_attention): as many key/value heads
as query heads are wanted; mask type 1 is causal from the top left; the log-sum-exp is fp32 [1, Hq, T] with T
rounded up to a multiple of 32, and rows beyond T are +inf, so that they weigh nothing. Heads are read 16
bytes at a time, and bf16 needs compute capability 8.0 (kernel_forward.h there, `kAlignmentQ`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.attention.kernels.schema import mismatch
from flexcp.attention.merge import accumulator_dtype

_FORWARD, _BACKWARD = "_efficient_attention_forward", "_efficient_attention_backward"
_INPUTS = ["query Tensor", "key Tensor", "value Tensor", "bias Tensor"]
_FULL, _CAUSAL = 0, 1  # mask types
_ALIGNED_BYTES = 16  # heads are read in pieces of so many
_OLDEST_BF16 = (8, 0)  # compute capability
_ROWS = 32  # the log-sum-exp comes and goes in blocks of so many rows


def why_not() -> str:
    """What is missing in this torch; empty where nothing is."""
    sequences = ["cu_seqlens_q Tensor", "cu_seqlens_k Tensor", "max_seqlen_q int", "max_seqlen_k int"]
    mask = "custom_mask_type int"
    forward = [*_INPUTS, *sequences, "dropout_p float", mask, "compute_log_sumexp bool"]
    backward = ["_ Tensor", *_INPUTS, "out Tensor", *sequences, "logsumexp Tensor", "dropout_p float"]
    backward += ["_ Tensor", "_ Tensor", mask, "bias_requires_grad bool"]
    return mismatch(_FORWARD, forward, ["scale"], ["Tensor"] * 2) or mismatch(
        _BACKWARD, backward, ["scale"], ["Tensor"] * 3
    )


class EfficientKernel:
    """Never forms scores; head widths of whole 16 bytes."""

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""
        if device.type != "cuda" or dtype == torch.float64 or torch.version.hip is not None:
            return False
        if head_dim * dtype.itemsize % _ALIGNED_BYTES:
            return False
        return dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) >= _OLDEST_BF16

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        run = getattr(torch.ops.aten, _FORWARD)
        groups = q.shape[1] // k.shape[1]
        inputs = q.unsqueeze(0), _repeated(k, groups), _repeated(v, groups)
        mask = _CAUSAL if causal else _FULL
        out, lse, *_ = run(*inputs, None, None, None, None, None, 0.0, mask, True, scale=scale)
        return out[0], lse[0, :, : len(q)].transpose(0, 1)

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
        groups = q.shape[1] // k.shape[1]
        inputs = q.unsqueeze(0), _repeated(k, groups), _repeated(v, groups)
        padded = lse.new_full((1, lse.shape[1], -(-len(q) // _ROWS) * _ROWS), float("inf"))
        padded[0, :, : len(q)] = lse.transpose(0, 1)
        unread = q.new_empty((), dtype=torch.int64)  # the random state of dropout, which is 0
        dq, dk, dv, _ = run(
            do.unsqueeze(0),
            *inputs,
            None,
            out.contiguous().unsqueeze(0),
            None,
            None,
            len(q),
            len(k),
            padded,
            0.0,
            unread,
            unread,
            _CAUSAL if causal else _FULL,
            False,
            scale=scale,
        )
        return dq[0], _summed(dk[0], groups), _summed(dv[0], groups)


def _repeated(x: Tensor, groups: int) -> Tensor:
    """[T, Hk, D] as [1, T, Hq, D], every head for its group of query heads."""
    return (x if groups == 1 else x.repeat_interleave(groups, dim=1)).unsqueeze(0)


def _summed(x: Tensor, groups: int) -> Tensor:
    """Gradients of repeated heads [T, Hq, D], added up to those of the heads [T, Hk, D]."""
    if groups == 1:
        return x
    grouped = x.view(len(x), -1, groups, x.shape[-1])
    return grouped.sum(2, dtype=accumulator_dtype(x.dtype)).to(x.dtype)
