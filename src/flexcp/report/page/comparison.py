"""What other policies would have planned for the steps that a run really had, at the costs of its plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flexcp.core.errors import FlexCPError, InputError
from flexcp.core.jsonl import number
from flexcp.core.run_folder import RunInfo
from flexcp.core.sample import Sample
from flexcp.cost.correction import Correction
from flexcp.cost.model import CostModel, Link
from flexcp.planner import POLICIES, Planner
from flexcp.planner.outcome import Outcome, outcome_of
from flexcp.report.page.limits import MOST_RANK_FILES

_SLOW = ("flexsp",)  # solves integer programmes for seconds a step
_MOST_RANKS, _MOST_SAMPLES = MOST_RANK_FILES, 20_000


@dataclass(frozen=True)
class PlannedStep:
    """A step of a run as its planner saw it.

    Attributes:
        samples: the global batch.
        info: of the attempt that ran it.
        factors: what was learnt of the costs until then, see `StepReport.plan_factors`.
    """

    samples: tuple[Sample, ...]
    info: RunInfo
    factors: tuple[float, ...] = ()

    @cached_property
    def cost(self) -> CostModel:
        """The cost model that its plan was made with.

        Raises:
            KeyError, TypeError, ValueError: its coefficients are missing or none.
        """
        values = dict(self.info.coefficients)
        links = {name: Link(**values[name]) for name in ("intra", "inter")}
        for link in links.values():
            number(link.bytes_per_s, "bytes_per_s", 1.0)
            number(link.latency_s, "latency_s", 0.0)
        for name, value in values.items():
            if name not in (*links, "exchange"):
                number(value, name, 0.0)
        cost = CostModel(**{**values, **links})
        return Correction(self.factors).apply(cost) if self.factors else cost

    def planner(self, policy: str) -> Planner:
        """What would have planned it by another policy."""
        info = self.info
        return Planner(info.cluster, self.cost, policy, info.mode, info.whole_below_tokens)


def compare_policies(
    info: RunInfo, steps: Sequence[PlannedStep]
) -> tuple[tuple[Outcome, ...], tuple[str, ...]]:
    """A row for each policy, the run's own last; or why there is none.

    Args:
        info: of the run.
        steps: those of which all samples are known.
    """
    own, infos = info.policy, (info, *(step.info for step in steps))
    size = sum(len(step.samples) for step in steps)
    if size > _MOST_SAMPLES or any(i.cluster.ranks > _MOST_RANKS for i in infos):
        return (), ("Policies are not compared: the run is too large. flexcp plan compares them.",)
    if not steps:
        return (), ("Policies are not compared: the traces are not complete.",)
    names = [name for name in reversed(POLICIES) if name not in (*_SLOW, own)]
    try:
        return tuple(_outcome(name, steps) for name in (*names, own)), ()
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeWarning) as error:
        raise InputError(
            f"the coefficients in run.json cannot be used ({type(error).__name__}: {error})",
            "Copy run.json again; a run that was resumed writes it anew.",
        ) from None


def _outcome(name: str, steps: Sequence[PlannedStep]) -> Outcome:
    try:
        plans = [step.planner(name)(step.samples) for step in steps]
    except FlexCPError as error:
        return Outcome(name, refusal=error.cause)
    number(sum(plan.step_s for plan in plans), f"the time of {name}", 1e-12)
    return outcome_of(name, plans, [step.cost for step in steps])
