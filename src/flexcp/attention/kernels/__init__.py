"""Attention on one tile, and the one table that says which kernel serves which device.

No messages and no masks here: a tile is a full rectangle or a causal square.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from flexcp.attention.kernels import cpu
from flexcp.attention.kernels.cpu import CpuKernel
from flexcp.attention.kernels.dense import DenseKernel
from flexcp.core.errors import UnsupportedError

__all__ = ["CpuKernel", "DenseKernel", "Kernel", "kernel_for"]

_LOG = logging.getLogger(__name__)


class Kernel(Protocol):
    """Attention of one tile; Hq is a multiple of Hk. Never called with an empty tensor."""

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


# Tested once, at import, so that a torch without these operators falls back instead of failing in a step.
_KERNELS: dict[str, Kernel] = {"cpu": CpuKernel()} if cpu.is_available() else {}
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=64)
def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """The fastest kernel known for a device; without one, the dense kernel and a logged warning.

    Raises:
        UnsupportedError: attention has no meaning in this dtype.
    """
    if dtype not in _DTYPES:
        names = ", ".join(str(known) for known in _DTYPES)
        raise UnsupportedError(f"attention in {dtype} is not implemented", f"Use one of {names}.")
    kernel = _KERNELS.get(device.type)
    if kernel is None:
        _LOG.warning(
            "no attention kernel for device %r: using dense matrix products, "
            "which take memory for rows x rows scores",
            device.type,
        )
        return DenseKernel()
    return kernel
