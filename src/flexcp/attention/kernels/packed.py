"""What kernels share that attend within many sequences in one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from flexcp.attention.calls import Bounds, bounds_of


class PackedKernel(ABC):
    """A kernel of sequences that lie side by side; a tile is a call of one sequence. See `Kernel`."""

    @abstractmethod
    def serves(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
        """See `Kernel.serves`."""

    @abstractmethod
    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`, for each of the sequences of `bounds`, which are all rows of q and of k."""

    @abstractmethod
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
        """As `Kernel.backward`, for each of the sequences of `bounds`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        return self.forward_packed(q, k, v, _one_tile(len(q), len(k), q.device), causal, scale)

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
        bounds = _one_tile(len(q), len(k), q.device)
        return self.backward_packed(do, q, k, v, out, lse, bounds, causal, scale)


@lru_cache(maxsize=256)
def _one_tile(q_rows: int, k_rows: int, device: torch.device) -> Bounds:
    return bounds_of([q_rows], [k_rows], device)
