"""The loss rule: labels shifted before a sample is cut, token losses summed, one global divisor.

The divisor is the number of supervised tokens of the whole global batch, so the gradient never carries a
factor of degree, CP or DP.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexcp.core.errors import UnsupportedError
from flexcp.core.sample import IGNORE_INDEX

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

    Widened to fp32 chunk by chunk, in backward again, so nothing of size [T, V] is ever held in fp32; the
    gradient is rounded once, scaled. Without a target the sum is an exact zero that still has a gradient
    path: the rank's backward runs and its ring neighbours are served.

    Raises:
        UnsupportedError: there are more or fewer rows of logits than targets.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    if len(rows) != len(targets):
        raise UnsupportedError(
            f"the model gave logits for {len(rows)} rows, the micro-batch has {len(targets)}",
            "Return the logits of every row (logits_to_keep = 0), and shift no labels: FlexCP has done so.",
        )
    total: Tensor = _TokenLossSum.apply(rows, targets)  # type: ignore[no-untyped-call]
    return total


class _TokenLossSum(torch.autograd.Function):
    """Cross entropy that keeps the logits and nothing else until backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, targets)
        total = rows.new_zeros((), dtype=torch.promote_types(rows.dtype, torch.float32))
        for part, index, supervised in _chunks(targets):
            log_p = F.log_softmax(rows[part], dim=-1, dtype=total.dtype)
            total -= torch.where(supervised, log_p.gather(1, index)[:, 0], 0).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        rows, targets = ctx.saved_tensors
        gradient = torch.empty_like(rows)
        for part, index, supervised in _chunks(targets):
            slope = F.softmax(rows[part], dim=-1, dtype=scale.dtype)
            slope.scatter_add_(1, index, slope.new_full(index.shape, -1.0))
            gradient[part] = slope.mul_(supervised[:, None] * scale)
        return gradient, None


def _chunks(targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows of a chunk, their targets [rows, 1] (0 where there is none), and whether there is one [rows]."""
    for start in range(0, len(targets), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        supervised = targets[part] != IGNORE_INDEX
        yield part, torch.where(supervised, targets[part], 0)[:, None], supervised
