"""The loss rule: labels shifted before a sample is cut, token losses summed, one global divisor.

The divisor is the number of supervised tokens of the whole global batch, so the gradient never carries a
factor of degree, CP or DP.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # the field's mark for a token that is not a target
_CHUNK_ROWS = 1024  # rows whose logits are widened to fp32 at a time


def shift_labels(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Target of each row of one whole sample: the next row's label; the last row has none.

    >>> shift_labels(np.array([5, 6, 7])).tolist()
    [6, 7, -100]
    """
    shifted = np.full_like(labels, IGNORE_INDEX)
    shifted[:-1] = labels[1:]
    return shifted


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of the supervised rows, as a scalar of at least fp32.

    Args:
        logits: [..., T, V] of this rank's rows.
        targets: [T], already shifted; rows with -100 add nothing.

    Widened to fp32 chunk by chunk. The gradient is computed beside the loss and kept in the dtype of the
    logits, so nothing of size [T, V] is ever held in fp32. Without a target the sum is an exact zero that
    still has a gradient path: the rank's backward runs and its ring neighbours are served.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    total: Tensor = _TokenLossSum.apply(rows, targets)  # type: ignore[no-untyped-call]
    return total


class _TokenLossSum(torch.autograd.Function):
    """Cross entropy whose backward is one multiplication."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((), dtype=wide)
        gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for start in range(0, len(rows), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            supervised = targets[part] != IGNORE_INDEX
            index = torch.where(supervised, targets[part], 0)[:, None]
            log_p = F.log_softmax(rows[part].to(wide), dim=-1)
            total -= log_p.gather(1, index)[:, 0][supervised].sum()
            if gradient is not None:
                slope = log_p.exp_().scatter_add_(1, index, log_p.new_full(index.shape, -1.0))
                gradient[part] = slope * supervised[:, None]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        for rows in gradient.split(_CHUNK_ROWS):
            # In fp32: rounding 1 / tokens to bf16 would scale every gradient by up to 0.4 %. In place: a
            # second backward through the same loss finds its saved tensor changed, and autograd says so.
            rows.copy_(rows.to(scale.dtype) * scale)
        return gradient, None
