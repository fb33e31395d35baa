"""What `flexcp plan` computes: every policy on the same global batches, and one verdict.

Values in, values out. The verb in `plan.py` reads the options and prints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, InfeasibleError, UnsupportedError
from flexcp.core.layout import default_whole_below_tokens
from flexcp.core.lengths import Lengths
from flexcp.core.plan import Mode, Plan
from flexcp.core.sample import Sample
from flexcp.cost import CostModel
from flexcp.planner import POLICIES, Planner, lower_bound_s
from flexcp.planner.exchanges import plan_bound
from flexcp.planner.outcome import Outcome, outcome_of
from flexcp.planner.policies import static
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import schedule
from flexcp.report.tables import format_seconds

NOT_WORTH_BELOW = 1.03  # under 3 % the cost model's own error decides, so no promise is made
NEARLY_EQUAL = 1.5  # longest over median
# In the order shown; the policy that the comparison is about comes last.
_ORDER = ("static", "ulysses", "megatron-dynamic", "flexsp", "paper", "flexcp")
ONLY_NAMED = {"flexsp": "solves integer programmes for seconds: --policy flexsp"}

Policy = Callable[[Sequence[Sample]], Plan]


@dataclass(frozen=True, slots=True)
class Setting:
    """What every policy is given, apart from the samples."""

    cluster: Cluster
    cost: CostModel
    mode: Mode

    @property
    def whole_below_tokens(self) -> int:
        """Samples shorter than this are never cut."""
        return default_whole_below_tokens(self.cluster.tokens_per_rank)

    def problem(self, samples: Sequence[Sample]) -> Problem:
        """One global batch under this setting."""
        return Problem.of(samples, self.cluster, self.cost, self.mode, self.whole_below_tokens)


def run_policy(name: str, policy: Policy, batches: Sequence[Sequence[Sample]], setting: Setting) -> Outcome:
    """Plan every batch; a policy that cannot serve one of them says why instead."""
    plans, spent_s = [], 0.0
    try:
        for batch in batches:
            started = time.perf_counter()
            plans.append(policy(batch))
            spent_s += time.perf_counter() - started
    except (InfeasibleError, UnsupportedError) as error:
        return Outcome(name, refusal=error.cause)
    return outcome_of(name, plans, [setting.cost] * len(plans), 1000 * spent_s / len(plans))


def compare(
    batches: Sequence[Sequence[Sample]],
    setting: Setting,
    *,
    policy: str = "all",
    current_cp: int | None = None,
) -> tuple[list[Outcome], Outcome]:
    """Every policy on the same batches: rows in the order shown, what they are about last; the baseline.

    Args:
        batches: the samples of each step.
        setting: what they run on, what it costs, and who waits for whom.
        policy: the one to look at; `all` looks at `flexcp` and shows every other one beside it.
        current_cp: degree of the layout in use; with it that layout is the baseline, else `static` is.

    Raises:
        ConfigError: the degree in use does not divide the ranks.
    """
    subject = "flexcp" if policy == "all" else policy
    names = sorted(POLICIES, key=_ORDER.index) if policy == "all" else ["static"]
    names = [*(name for name in names if name != subject), subject]
    outcomes = [_row(name, batches, setting, policy) for name in names]
    if current_cp is None:
        return outcomes, next(outcome for outcome in outcomes if outcome.policy == "static")
    ranks = setting.cluster.ranks
    if current_cp < 1 or ranks % current_cp:
        raise ConfigError(
            f"--current-cp {current_cp} does not divide {ranks} ranks",
            "A static layout has one degree on all ranks.",
        )
    layout = partial(static_plan, current_cp, setting)
    in_use = run_policy(f"static cp={current_cp}", layout, batches, setting)
    return [in_use, *outcomes], in_use


def _row(name: str, batches: Sequence[Sequence[Sample]], setting: Setting, policy: str) -> Outcome:
    if policy == "all" and name in ONLY_NAMED:
        return Outcome(name, refusal=ONLY_NAMED[name])
    planner = Planner(setting.cluster, setting.cost, name, setting.mode)
    return run_policy(name, planner, batches, setting)


def static_plan(degree: int, setting: Setting, samples: Sequence[Sample]) -> Plan:
    """The static layout of one degree, packed as fairly as the policy `static` packs.

    Raises:
        InfeasibleError: the degree does not hold the longest sample.
    """
    longest = max(sample.tokens for sample in samples)
    if (needed := setting.cluster.min_degree(longest)) > degree:
        raise InfeasibleError(
            f"a sample of {longest} tokens needs degree {needed}, the layout has {degree}",
            "Give the degree that is really in use, or the tokens per rank.",
        )
    problem = setting.problem(samples)
    layouts = (schedule(problem, assignment) for assignment in static.with_degree(problem, degree))
    tasks = min(layouts, key=lambda tasks: max(task.end_s for task in tasks))
    bound_s = lower_bound_s(problem)
    return Plan(
        "static", setting.mode, setting.cluster, setting.whole_below_tokens, tuple(samples), tasks, bound_s
    )


def verdict(outcomes: Sequence[Outcome], baseline: Outcome, lengths: Lengths, setting: Setting) -> str:
    """What the person who has to decide needs: what it gives over the layout in use, and what limits it.

    Another policy that beats the layout in use as well is named, so that the speed is not all put down to
    the subject, the last of the outcomes.
    """
    *others, subject = outcomes
    in_use = baseline.policy != "static"
    layout = f"the layout in use ({baseline.policy})" if in_use else "the best static layout"
    if not subject.plans:
        return f"{subject.policy} cannot serve these lengths: {subject.refusal}."
    step = f"{format_seconds(subject.step_s)} a step"
    plan = subject.plans[0]
    limit = plan_bound(setting.problem(plan.samples), plan.step_s).reason
    distance = f"{subject.gap - 1:.1%} above the bound, which is {limit}"
    if not baseline.plans:
        return f"{subject.policy} takes {step}, {distance}; {layout} cannot serve: {baseline.refusal}."
    if subject.policy == baseline.policy:
        return f"{subject.policy} takes {step}, {distance}."
    speed = baseline.step_s / subject.step_s
    against = f"{layout}, {format_seconds(baseline.step_s)}"
    equal = float(lengths.max()) < NEARLY_EQUAL * float(np.median(lengths))
    if speed < NOT_WORTH_BELOW:
        reason = "lengths are nearly equal" if equal else f"the gain is under {NOT_WORTH_BELOW - 1:.0%}"
        change = f"{speed - 1:.1%} faster than" if speed >= 1.0005 else "no faster than"
        what = "Not" if subject.policy == "flexcp" else f"{subject.policy} is not"
        return (
            f"{what} worth adopting here: {reason}. {subject.policy}, {step}, is {change} {against}; "
            f"the bound is {limit}."
        )
    rival = min((other for other in others if other.plans), key=lambda other: other.step_s)
    beside = ""
    if rival.step_s * NOT_WORTH_BELOW < baseline.step_s:
        beside = f" The next best, {rival.policy}, takes {format_seconds(rival.step_s)}."
    return f"{subject.policy} takes {step}: {speed:.2f}× the speed of {against}. It is {distance}.{beside}"
