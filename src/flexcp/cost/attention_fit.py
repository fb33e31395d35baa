"""Attention times that others measured, fitted on half of their packs and judged on the other half.

One layer takes, with the heads over tp ranks and the rows over cp::

    T = pair_s * pairs / (tp * cp) + token_s * tokens / tp + document_s * documents + fixed_s[cp]

What a plain c * sum(L^2) lacks: every rank of a ring reads all keys and values of its heads (tokens / tp), a
document fills its last tile in part, and a call takes its time. On packs of many short documents the latter
two are up to a fifth of the time; on single documents of 512 to 8192 tokens the first is up to a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexcp.core.errors import InputError
from flexcp.cost.fit import non_negative
from flexcp.cost.measurements import AttentionTime
from flexcp.cost.model import Array

_FEWEST_PACKS = 8


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Coefficients, and how well they predict packs that they were not fitted on.

    Attributes:
        pair_s, token_s, document_s: seconds per attended pair, per token and per document, one layer.
        fixed_s: cp to seconds that a call takes however small it is.
        seed: of the split of the packs.
        fitted_packs, unseen_packs: different packs in each half.
        unseen_rows: measurements of the unseen packs.
        error_mean, error_max: relative, over `unseen_rows`.
    """

    pair_s: float
    token_s: float
    document_s: float
    fixed_s: dict[int, float]
    seed: int
    fitted_packs: int
    unseen_packs: int
    unseen_rows: int
    error_mean: float
    error_max: float

    def seconds(self, lengths: Sequence[int], tp: int, cp: int) -> float:
        """Predicted time of one layer.

        Raises:
            InputError: this cp was not measured.
        """
        if cp not in self.fixed_s:
            raise InputError(f"cp {cp} was not measured", f"Measured: {', '.join(map(str, self.fixed_s))}.")
        shared_s = self.pair_s * _pairs(lengths) / (tp * cp) + self.token_s * sum(lengths) / tp
        return shared_s + self.document_s * len(lengths) + self.fixed_s[cp]


def fit_attention(rows: Sequence[AttentionTime], *, seed: int = 0) -> AttentionFit:
    """Fit relative errors by non-negative least squares on a random half of the packs.

    Packs are split, not rows: a pack measured at another cp would give the answer away.

    Args:
        rows: times of one model on one kind of device.
        seed: which packs are held out.

    Raises:
        InputError: too few different packs, all of one size, or a cp that only held-out packs have.
    """
    packs = sorted({row.lengths for row in rows})
    if len(packs) < _FEWEST_PACKS:
        raise InputError(
            f"{len(packs)} different packs are too few to fit and to judge the fit",
            f"Give at least {_FEWEST_PACKS}.",
        )
    if len({_pairs(pack) for pack in packs}) == 1:
        raise InputError(f"all {len(packs)} packs have the same pairs", "Measure packs of different lengths.")
    shuffled = np.random.default_rng(seed).permutation(len(packs))
    fitted = {packs[index] for index in shuffled[: len(packs) // 2]}
    known = np.array([row.lengths in fitted for row in rows])
    degrees = sorted({row.cp for row in rows if row.lengths in fitted})
    unknown = sorted({row.cp for row in rows} - set(degrees))
    if unknown:
        raise InputError(
            f"cp {', '.join(map(str, unknown))} occurs only in packs that are held out (seed {seed})",
            "Measure every cp on most packs, or leave its rows out.",
        )
    seconds = np.array([row.seconds for row in rows])
    columns = _columns(rows, degrees)
    values = non_negative(columns[known], seconds[known])
    errors = np.abs(columns[~known] @ values / seconds[~known] - 1)
    return AttentionFit(
        pair_s=float(values[0]),
        token_s=float(values[1]),
        document_s=float(values[2]),
        fixed_s={cp: float(value) for cp, value in zip(degrees, values[3:], strict=True)},
        seed=seed,
        fitted_packs=len(fitted),
        unseen_packs=len(packs) - len(fitted),
        unseen_rows=len(errors),
        error_mean=float(errors.mean()),
        error_max=float(errors.max()),
    )


def _columns(rows: Sequence[AttentionTime], degrees: Sequence[int]) -> Array:
    table = [
        [
            _pairs(row.lengths) / (row.tp * row.cp),
            sum(row.lengths) / row.tp,
            len(row.lengths),
            *(row.cp == cp for cp in degrees),
        ]
        for row in rows
    ]
    return np.array(table, dtype=np.float64)


def _pairs(lengths: Sequence[int]) -> int:
    return sum(length * (length + 1) // 2 for length in lengths)
