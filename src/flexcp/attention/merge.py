"""Joins partial attention results over disjoint keys, in place. The arithmetic only, no messages."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: fp64 for fp64, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Fold a tile into the running result, weighting each by its share of the softmax denominator.

    A row that nothing has touched is out = 0, lse = -inf, and so is a tile that sees no key; neither
    makes a NaN, and a NaN in the input still shows.

    Args:
        out: running output [R, Hq, D] in the accumulator dtype, changed in place.
        lse: running log-sum-exp [R, Hq] in the accumulator dtype, changed in place.
        tile_out: output of the tile [R, Hq, D], any float dtype.
        tile_lse: log-sum-exp of the tile [R, Hq].
    """
    joint = torch.logaddexp(lse, tile_lse)
    anchor = joint.clamp_min(torch.finfo(joint.dtype).min)  # -inf - -inf would be NaN
    out.mul_(torch.exp(lse - anchor).unsqueeze(-1))
    out.add_(tile_out * torch.exp(tile_lse - anchor).unsqueeze(-1))
    lse.copy_(joint)
