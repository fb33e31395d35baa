"""Measured task times correct the coefficients while a run goes on: bounded, smoothed, a small value.

A calibration is made once; clocks, neighbours and temperatures change, and a preset may be wrong from the
start. Four factors suffice: on attention, on everything linear, on fixed costs, and on traffic.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import InputError
from flexcp.cost.model import CostModel, Link

Array = npt.NDArray[np.float64]

CORRECTION_SCHEMA = "flexcp.correction/1"
# The terms of the formula and their coefficients.
_ATTENTION, _LINEAR = ("pair_s",), ("token_s",)
_FIXED, _TRAFFIC = ("sample_s", "pack_s", "ring_step_s"), ("intra", "inter")
TERMS = ("attention", "linear", "fixed", "traffic")
# A factor stays within these bounds, and changes by no more than this from step to step.
MOST, MOST_A_STEP = 16.0, 1.5
# What a step weighs beside the one after it; the pull towards the factors of the step before.
_MEMORY, _PULL = 0.9, 0.3
# Tasks that took so many times what their step's median task says were disturbed; they teach nothing.
_DISTURBED = 2.0


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the coefficients of a cost model, and what they were learnt from.

    Attributes:
        factors: by the order of `TERMS`; traffic divides bandwidths and multiplies latencies.
        gram, moment: sums over the tasks seen, older steps weighing less: of x·xᵀ, shape (4, 4), and of
            x·t, shape (4,), where x holds the seconds of a task by term and t what was measured, both
            relative to what was expected.
    """

    factors: tuple[float, ...] = (1.0,) * len(TERMS)
    gram: tuple[tuple[float, ...], ...] = ((0.0,) * len(TERMS),) * len(TERMS)
    moment: tuple[float, ...] = (0.0,) * len(TERMS)

    def apply(self, cost: CostModel) -> CostModel:
        """The corrected cost model; always of the one that was calibrated, never of a corrected one."""
        attention, linear, fixed, traffic = self.factors
        return replace(
            cost,
            pair_s=cost.pair_s * attention,
            token_s=cost.token_s * linear,
            sample_s=cost.sample_s * fixed,
            pack_s=cost.pack_s * fixed,
            ring_step_s=cost.ring_step_s * fixed,
            intra=Link(cost.intra.bytes_per_s / traffic, cost.intra.latency_s * traffic),
            inter=Link(cost.inter.bytes_per_s / traffic, cost.inter.latency_s * traffic),
        )

    def update(
        self, cost: CostModel, counts: Array, degree: Array, crosses: Array, seconds: Array
    ) -> Correction:
        """What the tasks of one more step say.

        The factors are a least-squares fit of measured times, relative errors counting, over the steps so
        far; each step weighs less the older it is. A pull towards the last factors keeps those still that
        the tasks do not tell apart.

        Args:
            cost: as calibrated, not corrected.
            counts: shape (K, fields), a row `Load.counts` for each task.
            degree: shape (K,), ranks of each task.
            crosses: shape (K,), whether its group crosses nodes.
            seconds: shape (K,), measured; tasks without a positive, finite time are left out.
        """
        terms = _terms(cost, self.apply(cost), counts, degree, crosses)
        expected_s = terms @ np.array(self.factors)
        known = np.isfinite(seconds) & (seconds > 0) & (expected_s > 0)
        if not known.any():
            return self
        ratio = np.where(known, seconds, 1.0) / np.where(known, expected_s, 1.0)
        known &= np.abs(np.log(ratio / np.median(ratio[known]))) <= np.log(_DISTURBED)
        # Relative to what was expected: relative to what was measured, noise would make tasks look short.
        x = terms[known] / expected_s[known, None]
        gram = _MEMORY * np.array(self.gram) + x.T @ x
        moment = _MEMORY * np.array(self.moment) + x.T @ ratio[known]
        last = np.array(self.factors)
        # Each term is pulled in its own measure; one that no task has is only held.
        pull = _PULL * np.diag(np.diag(gram) + 1e-6 * np.trace(gram))
        found = np.linalg.solve(gram + pull, moment + pull @ last)
        found = np.clip(found, last / MOST_A_STEP, last * MOST_A_STEP)
        factors = tuple(np.clip(found, 1 / MOST, MOST).tolist())
        return Correction(factors, tuple(map(tuple, gram.tolist())), tuple(moment.tolist()))

    def to_json(self) -> dict[str, Any]:
        """JSON values, as a checkpoint keeps them."""
        return {
            "schema": CORRECTION_SCHEMA,
            "factors": list(self.factors),
            "gram": [list(row) for row in self.gram],
            "moment": list(self.moment),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Correction:
        """Read what `to_json` wrote.

        Raises:
            InputError: another schema, or numbers that no update can have made.
        """
        if values.get("schema") != CORRECTION_SCHEMA:
            raise InputError(
                f"the correction has schema {values.get('schema')!r}; this version reads "
                f"{CORRECTION_SCHEMA!r}",
                "Continue with the version that wrote it, or without correction.",
            )
        made = cls(
            tuple(map(float, values["factors"])),
            tuple(tuple(map(float, row)) for row in values["gram"]),
            tuple(map(float, values["moment"])),
        )
        numbers = np.array([*made.factors, *made.moment, *np.ravel(made.gram)])
        sizes = len(made.factors), len(made.moment), *np.shape(made.gram)
        if sizes != (len(TERMS),) * 4 or not np.isfinite(numbers).all() or min(made.factors) <= 0:
            raise InputError(f"the correction {json.dumps(values)[:80]} is damaged", "Continue without it.")
        return made

    def __str__(self) -> str:
        """Factors in one line.

        >>> print(Correction())
        attention ×1.00, linear ×1.00, fixed ×1.00, traffic ×1.00
        """
        return ", ".join(f"{name} ×{factor:.2f}" for name, factor in zip(TERMS, self.factors, strict=True))


def _terms(cost: CostModel, corrected: CostModel, counts: Array, degree: Array, crosses: Array) -> Array:
    """Seconds of each task by term under the calibrated model, shape (K, 4).

    The formula is a sum of terms, each with its own coefficients; without all others it gives this one.
    Where attention hides traffic or is hidden by it, under the corrected model, the shorter counts nothing.
    """
    columns = counts.astype(np.float64).T
    free = Link(math.inf, 0.0)
    nothing = replace(
        cost, pair_s=0.0, token_s=0.0, sample_s=0.0, pack_s=0.0, ring_step_s=0.0, intra=free, inter=free
    )

    def seconds(of: CostModel, *names: str) -> Array:
        return replace(nothing, **{name: getattr(of, name) for name in names}).seconds(
            columns, degree, crosses
        )

    attention_s, traffic_s = seconds(corrected, *_ATTENTION), seconds(corrected, *_TRAFFIC)
    overlap = seconds(corrected, *_ATTENTION, *_TRAFFIC) < (attention_s + traffic_s) * (1 - 1e-9)
    return np.stack(
        [
            np.where(overlap & (attention_s < traffic_s), 0.0, seconds(cost, *_ATTENTION)),
            seconds(cost, *_LINEAR),
            seconds(cost, *_FIXED),
            np.where(overlap & (attention_s >= traffic_s), 0.0, seconds(cost, *_TRAFFIC)),
        ],
        axis=1,
    )
