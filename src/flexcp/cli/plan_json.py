"""The JSON of `flexcp plan`: enough to compute every task's time by hand; docs/plan_report.md says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexcp.core.plan import Plan
from flexcp.cost import CostModel
from flexcp.planner.outcome import Outcome

REPORT_SCHEMA = "flexcp.plan-report/2"


def report_json(
    inputs: dict[str, Any],
    cost: CostModel,
    outcomes: Sequence[Outcome],
    baseline: Outcome,
    sentence: str,
    *,
    with_tasks: bool,
) -> dict[str, Any]:
    """The object that `--json` prints and, with the tasks, `--out` writes."""
    coefficients = asdict(cost)
    del coefficients["exchange"]  # each task says its own
    policies = {outcome.policy: _outcome_json(outcome, baseline, with_tasks) for outcome in outcomes}
    return {
        "schema": REPORT_SCHEMA,
        "inputs": inputs,
        "coefficients": coefficients,
        "verdict": sentence,
        "baseline": baseline.policy,
        "policies": policies,
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
        "communication_share": outcome.communication_share,
        "steps": [_plan_json(plan, with_tasks) for plan in outcome.plans],
    }


def _plan_json(plan: Plan, with_tasks: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "waves": plan.num_waves,
        "degrees": plan.degrees,
        "exchanges": plan.exchanges,
        "digest": plan.digest,
    }
    if with_tasks:
        ids = [sample.id for sample in plan.samples]
        body["tasks"] = [
            asdict(task)
            | {
                "samples": [ids[index] for index in task.samples],
                "tokens": [sample.tokens for sample in plan.pack(task)],
                "pairs": sum(sample.work_pairs for sample in plan.pack(task)),
            }
            for task in plan.tasks
        ]
    return body
