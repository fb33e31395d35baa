"""Measured task times correct the coefficients while a run goes on: bounded, smoothed, a small value.

A calibration is made once; clocks, neighbours and temperatures change, and a preset may be wrong from the
start. Four factors suffice: on attention, on everything linear, on fixed costs, and on traffic.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import InputError
from flexcp.core.plan import ExchangeKind
from flexcp.cost.model import CostModel, Link

Array = npt.NDArray[np.float64]

CORRECTION_SCHEMA = "flexcp.correction/1"
FACTORS = ("attention", "linear", "fixed", "traffic")
# A factor stays within these bounds, and changes by no more than this from step to step.
MOST, MOST_A_STEP = 16.0, 1.5
# What a step weighs beside the one after it; the pull towards the factors of the step before.
_MEMORY, _PULL = 0.9, 0.3
# Tasks that took so many times what their step's median task says were disturbed; they teach nothing.
_DISTURBED = 2.0
# Sums over tasks stay far below this.
_MOST_SUM = 1e12
# By how much a factor is moved to see its slope; what it moves is linear but at kinks.
_STEP = 1e-4


@dataclass(frozen=True, slots=True)
class MeasuredTasks:
    """Tasks of one step, K of them.

    Attributes:
        counts: shape (K, fields), a row `Load.counts` for each.
        degree: shape (K,), ranks of each.
        crosses: shape (K,), whether its group crosses nodes.
        exchanges: how its ranks met.
        seconds: shape (K,), measured; NaN where it was not.
    """

    counts: npt.NDArray[np.int64]
    degree: npt.NDArray[np.int64]
    crosses: npt.NDArray[np.bool_]
    exchanges: Sequence[ExchangeKind]
    seconds: Array

    def seconds_under(self, cost: CostModel) -> Array:
        """What a cost model says, shape (K,)."""
        columns = self.counts.astype(np.float64).T
        found = np.zeros(len(self.degree))
        for kind in sorted(set(self.exchanges)):
            mine = np.array([kind == other for other in self.exchanges])
            timed = cost.with_exchange(kind).seconds(columns[:, mine], self.degree[mine], self.crosses[mine])
            found[mine] = timed
        return found


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors on the coefficients of a cost model, and what they were learnt from.

    Attributes:
        factors: by the order of `FACTORS`; traffic divides bandwidths and multiplies latencies.
        gram, moment: sums over the tasks seen, older steps weighing less: of x·xᵀ, shape (4, 4), and of
            x·t, shape (4,), where x holds the seconds of a task by term and t what was measured, both
            relative to what was expected.
        surprise: 1 or -1 where the last step was much longer or shorter as a whole than expected.
    """

    factors: tuple[float, ...] = (1.0,) * len(FACTORS)
    gram: tuple[tuple[float, ...], ...] = ((0.0,) * len(FACTORS),) * len(FACTORS)
    moment: tuple[float, ...] = (0.0,) * len(FACTORS)
    surprise: int = 0

    def apply(self, cost: CostModel) -> CostModel:
        """The corrected cost model; always of the one that was calibrated, never of a corrected one."""
        return _scaled(cost, self.factors)

    def update(self, cost: CostModel, tasks: MeasuredTasks) -> Correction:
        """What the tasks of one more step say.

        The factors are a least-squares fit of measured times, relative errors counting, over the steps so
        far; each step weighs less the older it is. A pull towards the last factors keeps those still that
        the tasks do not tell apart.

        Args:
            cost: as calibrated, not corrected.
            tasks: of one step; those without a positive, finite time are left out.
        """
        terms, last = _terms(cost, self.factors, tasks), np.array(self.factors)
        expected_s = terms @ last
        known = np.isfinite(tasks.seconds) & (tasks.seconds > 0) & (expected_s > 0)
        if not known.any():
            return self
        with np.errstate(over="ignore"):
            ratio = np.where(known, tasks.seconds, 1.0) / np.where(known, expected_s, 1.0)
        # What disturbs a task makes it long, so the lower of two middle ones is what is usual.
        usual = float(np.quantile(ratio[known], 0.5, method="lower"))
        if not 1 / MOST_A_STEP <= usual <= MOST_A_STEP:
            return self._surprised(1 if usual > 1 else -1)
        known &= np.abs(np.log(ratio / usual)) <= np.log(_DISTURBED)
        # Relative to what was expected: relative to what was measured, noise would make tasks look short.
        x = terms[known] / expected_s[known, None]
        gram = _MEMORY * np.array(self.gram) + x.T @ x
        moment = _MEMORY * np.array(self.moment) + x.T @ ratio[known]
        # Each term is pulled in its own measure; one that no task has is only held.
        pull = _PULL * np.diag(np.diag(gram) + 1e-6 * np.trace(gram))
        found = np.linalg.solve(gram + pull, moment + pull @ last)
        found = np.clip(found, last / MOST_A_STEP, last * MOST_A_STEP)
        factors = tuple(np.clip(found, 1 / MOST, MOST).tolist())
        return Correction(factors, tuple(map(tuple, gram.tolist())), tuple(moment.tolist()))

    def _surprised(self, sign: int) -> Correction:
        """A step of which all is long (or short): once, it was disturbed; twice, the machine has changed.

        Then all factors follow as far as they may in a step, and what was learnt before is forgotten.
        """
        if self.surprise != sign:
            return replace(self, surprise=sign)
        factors = np.clip(np.array(self.factors) * MOST_A_STEP**sign, 1 / MOST, MOST)
        return Correction(tuple(factors.tolist()), surprise=sign)

    def to_json(self) -> dict[str, Any]:
        """JSON values, as a checkpoint keeps them."""
        return {
            "schema": CORRECTION_SCHEMA,
            "factors": list(self.factors),
            "gram": [list(row) for row in self.gram],
            "moment": list(self.moment),
            "surprise": self.surprise,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Correction:
        """Read what `to_json` wrote.

        Raises:
            InputError: another schema, or numbers that no update can have made.
        """
        schema = values.get("schema") if isinstance(values, dict) else None
        if schema != CORRECTION_SCHEMA:
            raise InputError(
                f"the correction has schema {reprlib.repr(schema)}; this version reads {CORRECTION_SCHEMA!r}",
                "Continue with the version that wrote it, or without correction.",
            )
        try:
            made = cls(
                tuple(map(float, values["factors"])),
                tuple(tuple(map(float, row)) for row in values["gram"]),
                tuple(map(float, values["moment"])),
                int(values["surprise"]),
            )
        except (LookupError, TypeError, ValueError, OverflowError):
            made = cls(factors=())
        if not made.is_sound():
            raise InputError(f"the correction {json.dumps(values)[:80]} is damaged", "Continue without it.")
        return made

    def is_sound(self) -> bool:
        """Whether updates can have led here."""
        sizes = len(self.factors), len(self.moment), len(self.gram), *map(len, self.gram)
        if sizes != (len(FACTORS),) * (3 + len(self.gram)):
            return False
        gram, numbers = np.array(self.gram), np.array([*self.moment, *np.ravel(self.gram)])
        bounded = all(1 / MOST <= factor <= MOST for factor in self.factors) and self.surprise in (-1, 0, 1)
        return bool(bounded and (np.abs(numbers) < _MOST_SUM).all() and (gram == gram.T).all())

    def __str__(self) -> str:
        """Factors in one line.

        >>> print(Correction())
        attention ×1.00, linear ×1.00, fixed ×1.00, traffic ×1.00
        """
        return ", ".join(f"{name} ×{factor:.2f}" for name, factor in zip(FACTORS, self.factors, strict=True))


def _scaled(cost: CostModel, factors: Sequence[float]) -> CostModel:
    attention, linear, fixed, traffic = factors
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


def _terms(cost: CostModel, factors: Sequence[float], tasks: MeasuredTasks) -> Array:
    """Seconds of each task by term under the calibrated model, shape (K, 4), as far as nothing hides them.

    The formula is made of pieces that are linear in the four groups of coefficients and have no constant, so
    a term is its slope by its factor, and the terms times the factors add up to the whole (Euler).
    """
    whole_s = tasks.seconds_under(_scaled(cost, factors))
    terms = []
    for index, factor in enumerate(factors):
        more = [f * (1 + _STEP * (index == number)) for number, f in enumerate(factors)]
        terms.append((tasks.seconds_under(_scaled(cost, more)) - whole_s) / (_STEP * factor))
    return np.stack(terms, axis=1)
