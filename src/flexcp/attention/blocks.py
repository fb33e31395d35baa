"""Attention of local queries to blocks of keys, one after the other; sums in fp32 (fp64 for fp64)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from flexcp.attention.kernels import Kernel
from flexcp.attention.masks import Tile
from flexcp.attention.merge import accumulator_dtype, merge_

# What the queries attend to in a block, its keys and its values [R, Hk, D].
Block = tuple[Sequence[Tile], Tensor, Tensor]


def forward_over(q: Tensor, blocks: Iterable[Block], kernel: Kernel, scale: float) -> tuple[Tensor, Tensor]:
    """Output [T, Hq, D] in q's dtype and its log-sum-exp [T, Hq] in the accumulator dtype."""
    dtype = accumulator_dtype(q.dtype)
    out = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
    for tiles, block_k, block_v in blocks:
        for q0, q1, k0, k1, causal in tiles:
            tile = kernel.forward(q[q0:q1], block_k[k0:k1], block_v[k0:k1], causal, scale)
            merge_(out[q0:q1], lse[q0:q1], *tile)
    return out.to(q.dtype), lse


class Backward:
    """Backward of `forward_over`: one call for each block.

    Args:
        do: gradient of the output [T, Hq, D].
        q: queries [T, Hq, D].
        out: output [T, Hq, D].
        lse: log-sum-exp over all keys [T, Hq].
        kernel: what computes a tile.
        scale: factor on the scores.

    Attributes:
        dq: sum so far [T, Hq, D], in the accumulator dtype.
    """

    def __init__(self, do: Tensor, q: Tensor, out: Tensor, lse: Tensor, kernel: Kernel, scale: float) -> None:
        self._do, self._q, self._out, self._lse = do, q, out, lse
        self._kernel, self._scale = kernel, scale
        self.dq = q.new_zeros(q.shape, dtype=accumulator_dtype(q.dtype))

    def add(self, block: Block, dkv: Tensor) -> None:
        """Add to `dq`, and to dK and dV of the block, `dkv` [R, 2, Hk, D]."""
        tiles, block_k, block_v = block
        for q0, q1, k0, k1, causal in tiles:
            rows, keys = slice(q0, q1), slice(k0, k1)
            tile_dq, tile_dk, tile_dv = self._kernel.backward(
                self._do[rows],
                self._q[rows],
                block_k[keys],
                block_v[keys],
                self._out[rows],
                self._lse[rows],
                causal,
                self._scale,
            )
            self.dq[rows] += tile_dq
            dkv[keys, 0] += tile_dk
            dkv[keys, 1] += tile_dv
