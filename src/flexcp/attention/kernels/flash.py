"""FlashAttention-2 on CUDA by torch's own operators, in fp16 and bf16: many sequences a call.

The operators are called below autograd: backward gets the output and log-sum-exp over all keys of the rows,
not those of the call. Read in torch's source (aten/src/ATen/native/transformers/cuda/flash_attn):
with `cu_seqlens` the log-sum-exp is fp32 [Hq, T] forth and back, and back it must be contiguous; a causal
mask is aligned at its bottom right, which for squares is its top left as well; dropout 0 reads no random
state.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flexcp.attention.calls import Bounds
from flexcp.attention.kernels.packed import PackedKernel
from flexcp.attention.kernels.schema import mismatch
from flexcp.core.errors import UnsupportedError

_FORWARD, _BACKWARD = "_flash_attention_forward", "_flash_attention_backward"
_INPUTS = ["query Tensor", "key Tensor", "value Tensor"]
_SEQUENCES = ["cum_seq_q Tensor", "cum_seq_k Tensor", "max_q int", "max_k int"]
_OPTIONS = ["dropout_p float", "is_causal bool"]
_WIDEST_HEAD = 256
_OLDEST = (8, 0)  # compute capability


def why_not() -> str:
    """What is missing in this torch; empty where nothing is."""
    forward = [*_INPUTS, *_SEQUENCES, *_OPTIONS, "return_debug_mask bool"]
    states = ["out Tensor", "logsumexp Tensor"]
    backward = ["grad_out Tensor", *_INPUTS, *states, *_SEQUENCES, *_OPTIONS, "_ Tensor", "_ Tensor"]
    return mismatch(_FORWARD, forward, ["scale"], ["Tensor"] * 2) or mismatch(
        _BACKWARD, backward, ["scale"], ["Tensor"] * 3
    )


class FlashKernel(PackedKernel):
    """Never forms scores, knows grouped heads; head widths are multiples of 8 up to 256."""

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""
        return (
            device.type == "cuda"
            and dtype in (torch.float16, torch.bfloat16)
            and head_dim % 8 == 0
            and head_dim <= _WIDEST_HEAD
            and torch.version.hip is None
            and torch.cuda.get_device_capability(device) >= _OLDEST
        )

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `PackedKernel.forward_packed`."""
        run = getattr(torch.ops.aten, _FORWARD)
        out, lse, *_ = run(q, k, v, *_sequences(bounds), 0.0, causal, False, scale=scale)
        if lse.shape != (q.shape[1], q.shape[0]):
            raise UnsupportedError(
                f"torch {torch.__version__} gives a log-sum-exp {tuple(lse.shape)} for {q.shape[0]} rows and "
                f"{q.shape[1]} heads, not [heads, rows]",
                "Use the torch that FlexCP is tested with, and report this.",
            )
        return out, lse.transpose(0, 1)

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
        run = getattr(torch.ops.aten, _BACKWARD)
        heads_first = lse.transpose(0, 1).contiguous()  # a pointer is all that is read of it
        unread = _no_random_state(q.device)
        tensors = do, q, k, v, out, heads_first
        dq, dk, dv = run(*tensors, *_sequences(bounds), 0.0, causal, unread, unread, scale=scale)
        return dq, dk, dv


def _sequences(bounds: Bounds) -> tuple[Tensor, Tensor, int, int]:
    # Told that no sequence has more than one query, torch takes grouped heads another way, made for decoding.
    return bounds.cu_q, bounds.cu_k, max(2, bounds.max_q), bounds.max_k


@lru_cache(maxsize=16)
def _no_random_state(device: torch.device) -> Tensor:
    """Stands where dropout would have its seed and offset."""
    return torch.empty(2, dtype=torch.uint64, device=device)
