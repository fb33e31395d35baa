"""From measured task times to the coefficients of the time formula, by non-negative least squares.

Relative errors are minimised, so that a short task counts as much as a long one. The formula itself is not
repeated here: the column of a term is what `CostModel` says of it with all other coefficients 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import InputError
from flexcp.cost.measurements import Measurement, check_measurements, check_seconds
from flexcp.cost.model import Array, CostModel, Link

TERMS = ("pair_s", "token_s", "sample_s", "pack_s", "ring_step_s")
FOLDS = 5

_FEWEST = 2 * len(TERMS)
_ROUNDS = 20  # of deciding where communication shows; a handful is enough
_OUTLIER_SIGMAS, _OUTLIER_ERROR, _OUTLIER_SHARE = 5.0, 0.15, 0.1
_OWN_SHARE = 0.02  # of a term's column that the other terms' do not explain; less drowns in noise
_SIGMA_OF_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients and what is known of their errors.

    Attributes:
        cost: the formula with the fitted coefficients.
        spreads: term to how far its value moves when a fifth of the rows is left out: the largest change
            over the value, 0 where both are 0.
        errors: position of a row to its relative error, predicted by a fit without its fold.
        outliers: rows that were left out of the fit and of the errors.
    """

    cost: CostModel
    spreads: dict[str, float]
    errors: dict[int, float]
    outliers: tuple[Measurement, ...]

    @property
    def error_mean(self) -> float:
        """Of absolute errors."""
        return sum(map(abs, self.errors.values())) / len(self.errors)

    @property
    def error_max(self) -> float:
        """The worst."""
        return max(map(abs, self.errors.values()))


def fit_cost(rows: Sequence[Measurement], base: CostModel, *, seed: int = 0) -> Fit:
    """Fit the five time coefficients.

    Args:
        rows: measured tasks, of different lengths, numbers of samples and degrees.
        base: links, bytes and layers; its time coefficients are not used.
        seed: of the folds.

    Raises:
        InputError: a row is no measurement, or the rows cannot tell the terms apart.
    """
    check_measurements(rows)
    _check_variety(rows)
    table = _Table(rows, base)
    table.require_separable()
    kept = _inliers(table)
    values = table.fit(kept)
    if not (values[0] > 0 and values[1] > 0):
        term = TERMS[0] if values[0] <= 0 else TERMS[1]
        raise InputError(
            f"{term} came out as 0 from {len(rows)} measurements", "Measure longer samples, or more often."
        )
    changes = np.zeros(len(TERMS))
    errors: dict[int, float] = {}
    for fold in _folds(rows, kept, seed):
        others = table.fit(np.setdiff1d(kept, fold))
        changes = np.maximum(changes, np.abs(others - values))
        errors |= dict(zip(fold.tolist(), table.relative(others)[fold].tolist(), strict=True))
    spreads = np.divide(changes, values, out=np.where(changes > 0, 1.0, 0.0), where=values > 0)
    return Fit(
        cost=_with_times(base, values),
        spreads={term: float(spread) for term, spread in zip(TERMS, spreads, strict=True)},
        errors=errors,
        outliers=tuple(row for index, row in enumerate(rows) if index not in errors),
    )


def fit_link(message_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Bandwidth and latency from times of messages of several sizes.

    Raises:
        InputError: a time that is none, all of one size, or times that do not grow with it.
    """
    for size, time_s in zip(message_bytes, seconds, strict=True):
        check_seconds(time_s, f"a message of {size:,} bytes")
    if len(set(message_bytes)) < 2:
        raise InputError("messages of one size cannot tell bandwidth from latency", "Measure two sizes.")
    columns = np.stack([np.array(message_bytes, dtype=np.float64), np.ones(len(seconds))], axis=1)
    slope, latency_s = non_negative(columns, np.array(seconds, dtype=np.float64))
    if slope <= 0:
        raise InputError("larger messages took no longer than small ones", "Measure again, or larger ones.")
    return Link(bytes_per_s=float(1 / slope), latency_s=float(latency_s))


def non_negative(columns: Array, seconds: Array, explained: Array | None = None) -> Array:
    """Coefficients >= 0 that minimise the sum of squared errors of `columns @ x`, relative to `seconds`.

    Args:
        columns: one row a measurement, one column a coefficient.
        seconds: measured, above 0.
        explained: seconds of each row that are accounted for already.
    """
    from scipy.optimize import nnls  # an import of some weight, paid only by those who fit

    scale = np.maximum(columns.max(axis=0), 1e-300)
    target = 1.0 if explained is None else 1.0 - explained / seconds
    values, _ = nnls(columns / scale / seconds[:, None], np.broadcast_to(target, seconds.shape))
    return np.asarray(values / scale, dtype=np.float64)


class _Table:
    """Rows as columns of the formula, with what communication takes of each."""

    def __init__(self, rows: Sequence[Measurement], base: CostModel) -> None:
        counts = np.array([row.load.counts for row in rows], dtype=np.float64).T
        degrees = np.array([row.degree for row in rows])
        self.seconds = np.array([row.seconds for row in rows])
        waitless = base.silent()
        units = np.eye(len(TERMS))
        alone = [_with_times(waitless, unit).seconds(counts, degrees, False) for unit in units]
        self.columns: Array = np.stack(alone, axis=1)
        self.communication: Array = _with_times(base, 0 * units[0]).seconds(counts, degrees, False)

    def require_separable(self) -> None:
        """Refuse tasks of which one term is a mix of others: any share between them would fit as well.

        Raises:
            InputError: names the term and what it cannot be told from.
        """
        relative = self.columns / self.seconds[:, None]
        units = relative / np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
        for index, term in enumerate(TERMS):
            others = np.delete(units, index, axis=1)
            weights, *_ = np.linalg.lstsq(others, units[:, index], rcond=None)
            if np.linalg.norm(units[:, index] - others @ weights) < _OWN_SHARE:
                names = [name for name in TERMS if name != term]
                mixed = [name for name, part in zip(names, weights, strict=True) if abs(part) > _OWN_SHARE]
                raise InputError(
                    f"these tasks cannot tell {term} from {' and '.join(mixed)}: they grow together",
                    "Measure more lengths, with one and with several samples, at degrees 1, 2 and more.",
                )

    def fit(self, which: npt.NDArray[np.intp]) -> Array:
        """Coefficients from some of the rows.

        Attention and communication overlap, the longer of the two counts; which one that is depends on the
        answer, so it is fitted again until it stays. Of a cycle the best is taken.
        """
        exposed = np.zeros(len(which), dtype=bool)
        best, best_error = np.zeros(len(TERMS)), float("inf")
        for _ in range(_ROUNDS):
            columns = self.columns[which].copy()
            columns[exposed, 0] = 0.0
            explained = np.where(exposed, self.communication[which], 0.0)
            values = non_negative(columns, self.seconds[which], explained)
            error = float(np.square(self.relative(values)[which]).sum())
            if error < best_error:
                best, best_error = values, error
            now = values[0] * self.columns[which, 0] < self.communication[which]
            if (now == exposed).all():
                break
            exposed = now
        return best

    def relative(self, values: Array) -> Array:
        """Relative error of every row."""
        attention = np.maximum(values[0] * self.columns[:, 0], self.communication)
        predicted: Array = attention + self.columns[:, 1:] @ values[1:]
        error: Array = predicted / self.seconds - 1
        return error


def _with_times(base: CostModel, values: Array) -> CostModel:
    """The same links and bytes with other time coefficients, in the order of `TERMS`."""
    pair_s, token_s, sample_s, pack_s, ring_step_s = map(float, values)
    return replace(
        base, pair_s=pair_s, token_s=token_s, sample_s=sample_s, pack_s=pack_s, ring_step_s=ring_step_s
    )


def _inliers(table: _Table) -> npt.NDArray[np.intp]:
    """Rows that a first fit of all explains, but for the worst few; never more than a tenth goes."""
    everything = np.arange(len(table.seconds))
    errors = np.abs(table.relative(table.fit(everything)))
    limit = max(_OUTLIER_ERROR, _OUTLIER_SIGMAS * _SIGMA_OF_MAD * float(np.median(errors)))
    worst = np.argsort(-errors, kind="stable")[: int(len(errors) * _OUTLIER_SHARE)]
    return np.setdiff1d(everything, worst[errors[worst] > limit])


def _folds(rows: Sequence[Measurement], kept: npt.NDArray[np.intp], seed: int) -> list[npt.NDArray[np.intp]]:
    """Rows of the same task stay together, or a repeated one would be predicted from itself."""
    keys = sorted({(rows[index].load.counts, rows[index].degree) for index in kept})
    fold_of = dict(zip(keys, np.random.default_rng(seed).permutation(len(keys)) % FOLDS, strict=True))
    folds = np.array([fold_of[rows[index].load.counts, rows[index].degree] for index in kept])
    return [kept[folds == fold] for fold in range(FOLDS) if (folds == fold).any()]


def _check_variety(rows: Sequence[Measurement]) -> None:
    """Each term needs rows that differ in what it multiplies."""
    tasks = {(row.load.counts, row.degree) for row in rows}
    if len({row.load.tokens for row in rows}) < 2 <= len(rows):
        raise InputError(
            f"all {len(rows)} measurements have {rows[0].load.tokens} tokens", "Measure different lengths."
        )
    if len(tasks) < _FEWEST:
        raise InputError(
            f"{len(tasks)} different task{'s' * (len(tasks) != 1)} cannot give {len(TERMS)} coefficients",
            f"Measure at least {_FEWEST} of different lengths, samples and degrees.",
        )
    if all(row.load.samples == 1 for row in rows):
        raise InputError(
            "every measurement holds one sample: the cost of a sample cannot be told from that of a pack",
            "Measure packs of several samples too.",
        )
    if not any(row.degree > 1 and row.load.cut_samples for row in rows):
        raise InputError(
            "no measurement cuts a sample over several ranks: the cost of a ring is unknown",
            "Measure degree 2 and more too.",
        )
