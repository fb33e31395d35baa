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
    least = torch.finfo(lse.dtype).min  # -inf - -inf would be NaN
    share = torch.sigmoid(tile_lse.clamp_min(least) - lse.clamp_min(least))
    # One pass over `out`, which is most of the bytes.
    out.lerp_(tile_out.to(out.dtype), share.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, tile_lse, out=lse)
