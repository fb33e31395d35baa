"""What one step did, in numbers that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flexcp.core.jsonl import number, whole

_LEAST_S = 1e-12  # no step is shorter
_LEAST_FACTOR = 1e-3
_NOT_NEGATIVE = (
    "measured_s",
    "plan_s",
    "exposed_s",
    "idle_share",
    "plan_wait_s",
    "data_wait_s",
    "alone_s",
    "predicted_idle_share",
    "gather_s",
    "ring_wait_s",
    "reduce_s",
    "optimizer_s",
)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The same on every rank, but for `step_s`, `optimizer_s`, what follows from them, and `plan_factors`.

    On accelerators, times of tasks, and of waiting inside them, are those at which the host got its turn.

    Attributes:
        step: index of the step, from 0.
        loss: mean over the supervised tokens of the global batch; None where nothing was trained (simulated,
            skipped).
        grad_norm: global 2-norm before clipping; None likewise.
        tokens, supervised_tokens: of the global batch.
        degrees: number of tasks per degree.
        predicted_s, bound_s: makespan of the plan and its bound.
        measured_s: time of the slowest rank from its first task to the end of its last.
        step_s: wall time of the step, from its opening to the end of the optimizer.
        plan_s: time spent planning it, hidden or not.
        exposed_s: time at its opening that the slowest rank waited for its plan and its data; both begin
            with the first step.
        idle_share: share of rank-time between the first task and the end of the last on the slowest rank
            in which a rank had nothing to run.
        plan_wait_s, data_wait_s: the parts of `exposed_s`, each of the rank that waited longest for it. What
            a stream takes to tell its lengths counts as planning.
        pairs: attended query-key pairs of the global batch.
        longest_tokens: of its longest sample.
        alone_s: predicted time of the longest task that holds a single sample; 0 where there is none.
        predicted_idle_share: `idle_share` as the plan has it.
        gather_s: from the plan and data of the slowest rank until one can run tasks: agreeing on the plan,
            and gathering weights where they are sharded.
        ring_wait_s: inside tasks, until messages of the group had come and gone; mean over the ranks. A
            rank of the group that comes late to a task is waited for here.
        reduce_s: reducing and clipping gradients, on the rank that came to it last.
        optimizer_s: stepping the optimizer.
        idle_shares: `idle_share` of each rank.
        mfu: model FLOPs utilization: FLOPs of the model over those of all ranks at their peak in `step_s`;
            None where the peak is not known.
        skipped: loss or gradient was not finite, and the weights were left as they were.
        plan_factors: what was learnt of the costs when the step was planned: factors in the order of
            `cost.correction.TERMS`; empty where nothing is learnt, and on ranks that do not plan.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    tokens: int
    supervised_tokens: int
    degrees: dict[int, int]
    predicted_s: float
    bound_s: float
    measured_s: float
    step_s: float
    plan_s: float
    exposed_s: float
    idle_share: float
    plan_wait_s: float = 0.0
    data_wait_s: float = 0.0
    pairs: int = 0
    longest_tokens: int = 0
    alone_s: float = 0.0
    predicted_idle_share: float = 0.0
    gather_s: float = 0.0
    ring_wait_s: float = 0.0
    reduce_s: float = 0.0
    optimizer_s: float = 0.0
    idle_shares: tuple[float, ...] = ()
    mfu: float | None = None
    skipped: bool = False
    plan_factors: tuple[float, ...] = ()

    @property
    def parts_s(self) -> dict[str, float]:
        """Where `step_s` went, by part in the order of a step: seconds of the mean rank."""
        busy_s = self.measured_s * (1.0 - self.idle_share)
        parts = {
            "plan": self.plan_wait_s,
            "data": self.exposed_s - self.plan_wait_s,
            "gather": self.gather_s,
            "compute": busy_s - self.ring_wait_s,
            "ring wait": self.ring_wait_s,
            "idle": self.measured_s - busy_s,
            "reduce": self.reduce_s,
            "optimizer": self.optimizer_s,
        }
        parts = {name: max(0.0, seconds) for name, seconds in parts.items()}
        return {**parts, "other": max(0.0, self.step_s - sum(parts.values()))}

    @property
    def gap(self) -> float:
        """Predicted makespan over its bound."""
        return self.predicted_s / self.bound_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch over the wall time of the step."""
        return self.tokens / self.step_s

    def to_record(self) -> dict[str, Any]:
        """The line of `metrics.jsonl`: the fields, and what is computed from them."""
        return {**asdict(self), "gap": self.gap, "tokens_per_s": self.tokens_per_s}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StepReport:
        """Read what `to_record` wrote and JSON carried; keys that are not fields are left out.

        Raises:
            KeyError: a field is missing.
            ValueError: one is not a number of its kind, or a time that others are divided by is not positive.
        """
        values = {field.name: record[field.name] for field in fields(cls)}
        for name in ("step", "tokens", "supervised_tokens", "longest_tokens"):
            whole(values[name], name)
        for name in _NOT_NEGATIVE:
            number(values[name], name, 0.0)
        for name in ("predicted_s", "bound_s", "step_s"):
            number(values[name], name, _LEAST_S)
        for name in ("loss", "grad_norm", "mfu"):
            if values[name] is not None:
                number(values[name], name)
        if not isinstance(values["skipped"], bool):
            raise ValueError(f"skipped is {values['skipped']!r}")
        degrees = values["degrees"].items()
        values["degrees"] = {int(degree): whole(count, "a count of degrees") for degree, count in degrees}
        shares = values["idle_shares"]
        values["idle_shares"] = tuple(number(share, "an idle share", 0.0) for share in shares)
        factors = values["plan_factors"]
        values["plan_factors"] = tuple(number(factor, "a factor", _LEAST_FACTOR) for factor in factors)
        return cls(**values)
