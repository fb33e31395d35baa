"""The loss rule: labels shifted before a sample is cut, token losses summed, one global divisor.

The divisor is the number of supervised tokens of the whole global batch, so the gradient never carries a
factor of degree, CP or DP.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

IGNORE_INDEX = -100  # the field's mark for a token that is not a target
_CHUNK_ROWS = 2048  # rows whose logits are widened to fp32 at a time


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

    A rank without rows or without targets gets an exact zero that still has a gradient path, so that its
    backward runs and its ring neighbours are served.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows.sum(dtype=wide) * 0 if len(rows) == 0 else rows.new_zeros((), dtype=wide)
    for start in range(0, len(rows), _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        total = total + F.cross_entropy(
            rows[part].to(wide), targets[part], ignore_index=IGNORE_INDEX, reduction="sum"
        )
    return total
