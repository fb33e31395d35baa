"""What `flexcp plan` computes: batches from a list of lengths, every policy on them, one verdict.

Values in, values out. The verb in `plan.py` reads the options and prints.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, InfeasibleError, UnsupportedError
from flexcp.core.layout import DEFAULT_WHOLE_BELOW_TOKENS
from flexcp.core.plan import Mode, Plan
from flexcp.core.sample import Sample
from flexcp.cost import CostModel
from flexcp.planner import POLICIES, Planner, lower_bound_s
from flexcp.planner.policies import static
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import schedule
from flexcp.report.tables import Outcome, format_seconds

REPORT_SCHEMA = "flexcp.plan-report/1"
MODE: Mode = "lockstep"
NOT_WORTH_BELOW = 1.03  # under 3 % the cost model's own error decides, so no promise is made

Policy = Callable[[Sequence[Sample]], Plan]


def global_batches(
    samples: Sequence[Sample], size: int, steps: int, seed: int
) -> tuple[tuple[Sample, ...], ...]:
    """Draw without replacement; fewer or smaller batches where the samples run out.

    >>> samples = [Sample(i, 10 + i) for i in range(5)]
    >>> [len(batch) for batch in global_batches(samples, size=2, steps=9, seed=0)]
    [2, 2, 1]
    """
    drawn = random.Random(seed).sample(samples, min(len(samples), size * steps))  # noqa: S311 (no secret)
    return tuple(tuple(drawn[start : start + size]) for start in range(0, len(drawn), size))


def run_policy(name: str, policy: Policy, batches: Sequence[Sequence[Sample]]) -> Outcome:
    """Plan every batch; a policy that cannot serve one of them says why instead."""
    plans, spent_s = [], 0.0
    try:
        for batch in batches:
            started = time.perf_counter()
            plans.append(policy(batch))
            spent_s += time.perf_counter() - started
    except (InfeasibleError, UnsupportedError) as error:
        return Outcome(name, refusal=error.cause)
    return Outcome(name, tuple(plans), 1000 * spent_s / len(plans))


def compare(
    batches: Sequence[Sequence[Sample]],
    cluster: Cluster,
    cost: CostModel,
    *,
    policy: str = "all",
    current_cp: int | None = None,
) -> tuple[list[Outcome], Outcome]:
    """Every policy on the same batches: rows in the order shown, what they are about last; the baseline.

    Args:
        batches: the samples of each step.
        cluster: what they run on.
        cost: seconds of packs.
        policy: the one to look at; `all` looks at `flexcp` and shows every other one beside it.
        current_cp: degree of the layout in use; with it that layout is the baseline, else `static` is.

    Raises:
        ConfigError: the degree in use does not divide the ranks.
    """
    subject = "flexcp" if policy == "all" else policy
    beside = sorted(POLICIES.keys() - {subject, "static"}) if policy == "all" else []
    names = [name for name in ("static", *beside) if name != subject]
    outcomes = [run_policy(name, Planner(cluster, cost, name), batches) for name in (*names, subject)]
    if current_cp is None:
        return outcomes, next(outcome for outcome in outcomes if outcome.policy == "static")
    if current_cp < 1 or cluster.ranks % current_cp:
        raise ConfigError(
            f"--current-cp {current_cp} does not divide {cluster.ranks} ranks",
            "A static layout has one degree on all ranks.",
        )
    in_use = run_policy(f"static cp={current_cp}", partial(static_plan, current_cp, cluster, cost), batches)
    return [in_use, *outcomes], in_use


def static_plan(degree: int, cluster: Cluster, cost: CostModel, samples: Sequence[Sample]) -> Plan:
    """The static layout of one degree, packed as fairly as the policy `static` packs.

    Raises:
        InfeasibleError: the degree does not hold the longest sample.
    """
    longest = max(sample.tokens for sample in samples)
    if (needed := cluster.min_degree(longest)) > degree:
        raise InfeasibleError(f"a sample of {longest} tokens needs degree {needed}, the layout has {degree}")
    whole = min(DEFAULT_WHOLE_BELOW_TOKENS, cluster.tokens_per_rank // 2)
    problem = Problem.of(samples, cluster, cost, MODE, whole)
    layouts = (schedule(problem, assignment) for assignment in static.with_degree(problem, degree))
    tasks = min(layouts, key=lambda tasks: max(task.end_s for task in tasks))
    return Plan("static", MODE, cluster, whole, tuple(samples), tasks, lower_bound_s(problem))


def verdict(subject: Outcome, baseline: Outcome, samples: Sequence[Sample]) -> str:
    """One or two sentences for the person who has to decide."""
    layout = (
        "the best static layout" if baseline.policy == "static" else f"the layout in use, {baseline.policy}"
    )
    if not subject.plans:
        return f"{subject.policy} cannot serve these lengths: {subject.refusal}."
    step, distance = format_seconds(subject.step_s), f"{subject.gap - 1:.1%} above the bound"
    if not baseline.plans:
        return f"{subject.policy} takes {step} a step, {distance}; {layout} cannot serve: {baseline.refusal}."
    if subject.policy == baseline.policy:
        return f"{subject.policy} takes {step} a step, {distance}."
    speed = baseline.step_s / subject.step_s
    against = f"{layout} ({format_seconds(baseline.step_s)})"
    if speed < NOT_WORTH_BELOW:
        spread = max(s.tokens for s in samples) / statistics.median(s.tokens for s in samples)
        reason = (
            "lengths are nearly equal" if spread < 1.5 else f"the gain is under {NOT_WORTH_BELOW - 1:.0%}"
        )
        change = f"{speed - 1:.1%} faster than" if speed >= 1.0005 else "no faster than"
        return f"Not worth adopting here: {reason}. {subject.policy} ({step} a step) is {change} {against}."
    return f"{subject.policy} takes {step} a step: {speed:.2f}× the speed of {against}, {distance}."


def report_json(
    inputs: dict[str, Any],
    coefficients: dict[str, Any],
    outcomes: Sequence[Outcome],
    baseline: Outcome,
    sentence: str,
    *,
    with_tasks: bool,
) -> dict[str, Any]:
    """The object that `--json` prints and, with the tasks, `--out` writes; see docs/plan_report.md."""
    return {
        "schema": REPORT_SCHEMA,
        "inputs": inputs,
        "coefficients": coefficients,
        "verdict": sentence,
        "baseline": baseline.policy,
        "policies": {outcome.policy: _outcome_json(outcome, baseline, with_tasks) for outcome in outcomes},
    }


def _outcome_json(outcome: Outcome, baseline: Outcome, with_tasks: bool) -> dict[str, Any]:
    if not outcome.plans:
        return {"refusal": outcome.refusal}
    return {
        "step_s": outcome.step_s,
        "bound_s": outcome.bound_s,
        "gap": outcome.gap,
        "speed": baseline.step_s / outcome.step_s if baseline.plans else None,
        "plan_ms": outcome.plan_ms,
        "waves": outcome.waves,
        "degrees": outcome.degrees,
        "idle_share": outcome.idle_share,
        "steps": [_plan_json(plan, with_tasks) for plan in outcome.plans],
    }


def _plan_json(plan: Plan, with_tasks: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "waves": plan.num_waves,
        "degrees": plan.degrees,
        "digest": plan.digest,
    }
    if with_tasks:
        ids = [sample.id for sample in plan.samples]
        body["tasks"] = [
            asdict(task)
            | {
                "samples": [ids[index] for index in task.samples],
                "tokens": [sample.tokens for sample in plan.pack(task)],
            }
            for task in plan.tasks
        ]
    return body
