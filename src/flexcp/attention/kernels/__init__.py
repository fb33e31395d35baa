"""Attention on tiles, and the one table that says which kernel serves which device, dtype and head width.

No messages and no masks here: a tile is a full rectangle or a causal square.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from flexcp.attention.kernels import ascend, cpu, efficient, flash
from flexcp.attention.kernels.ascend import AscendKernel
from flexcp.attention.kernels.cpu import CpuKernel
from flexcp.attention.kernels.dense import DenseKernel
from flexcp.attention.kernels.efficient import EfficientKernel
from flexcp.attention.kernels.flash import FlashKernel
from flexcp.attention.kernels.packed import PackedKernel
from flexcp.core.errors import UnsupportedError

__all__ = [
    "AscendKernel",
    "CpuKernel",
    "DenseKernel",
    "EfficientKernel",
    "FlashKernel",
    "Kernel",
    "PackedKernel",
    "kernel_for",
]

_LOG = logging.getLogger(__name__)


class Kernel(Protocol):
    """Attention of one tile; Hq is a multiple of Hk. Never called with an empty tensor."""

    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether it can run there, in this dtype, with heads of this width."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Attend within the tile.

        Args:
            q: queries [Tq, Hq, D]; the last axis is contiguous, the others need not be.
            k: keys [Tk, Hk, D], strided like q.
            v: values [Tk, Hk, D], strided like q.
            causal: row i sees keys 0..i; only given for Tq = Tk.
            scale: factor on the scores.

        Returns:
            out [Tq, Hq, D] in the dtype of q, and lse [Tq, Hq] in fp32 (fp64 for fp64), the natural
            logarithm of the softmax denominator.
        """
        ...

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
        """Gradients of the tile.

        `out` [Tq, Hq, D] and `lse` [Tq, Hq] are those over *all* keys of the rows, not those of the tile:
        that makes the gradients of the tiles add up. `do` [Tq, Hq, D] has the dtype of q.

        Returns:
            dq [Tq, Hq, D], dk and dv [Tk, Hk, D].
        """
        ...


# Fastest first. Tested once, at import, so that a torch without these operators, or with others of the same
# name, falls back instead of failing in a step.
_TABLE: tuple[tuple[str, Kernel, str], ...] = (
    ("cpu", CpuKernel(), cpu.why_not()),
    ("cuda", FlashKernel(), flash.why_not()),
    ("cuda", EfficientKernel(), efficient.why_not()),
    ("npu", AscendKernel(), ascend.why_not()),
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=64)
def kernel_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> Kernel:
    """The fastest kernel that serves; without one, the dense kernel and a logged warning that says why.

    Args:
        device: of the queries.
        dtype: of the queries.
        head_dim: of the queries.
        softcap: scores s become softcap · tanh(s / softcap), which the dense kernel alone computes.

    Raises:
        UnsupportedError: attention has no meaning in this dtype.
    """
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise UnsupportedError(f"attention in {dtype} is not implemented", f"Use one of {names}.")
    if softcap is not None:
        return DenseKernel(softcap)
    reasons = [f"no attention kernel for {dtype} x {head_dim} on device {device.type!r}"]
    for device_type, kernel, why_not in _TABLE:
        if device_type != device.type:
            continue
        if why_not:
            reasons.append(f"{type(kernel).__name__}: {why_not}")
        elif kernel.serves(device, dtype, head_dim):
            return kernel
    _LOG.warning("%s: using plain matrix products, several times as slow", "; ".join(reasons))
    return DenseKernel()
