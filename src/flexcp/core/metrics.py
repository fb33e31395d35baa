"""What one step did, in numbers that a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flexcp.core.jsonl import number, whole

_LEAST_S = 1e-12  # no step is shorter


@dataclass(frozen=True, slots=True)
class StepReport:
    """The same on every rank. On accelerators, times of tasks are those at which the host got its turn.

    Attributes:
        step: index of the step, from 0.
        loss: mean over the supervised tokens of the global batch; None where nothing was trained (simulated).
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
        for name in ("step", "tokens", "supervised_tokens"):
            whole(values[name], name)
        for name in ("measured_s", "plan_s", "exposed_s", "idle_share"):
            number(values[name], name, 0.0)
        for name in ("predicted_s", "bound_s", "step_s"):
            number(values[name], name, _LEAST_S)
        for name in ("loss", "grad_norm"):
            if values[name] is not None:
                number(values[name], name)
        degrees = values["degrees"].items()
        values["degrees"] = {int(degree): whole(count, "a count of degrees") for degree, count in degrees}
        return cls(**values)
