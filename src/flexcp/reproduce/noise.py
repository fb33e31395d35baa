"""Plans made with wrong coefficients, priced with the right ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan
from flexcp.cost import CostModel
from flexcp.cost.model import Link
from flexcp.planner import make_plan
from flexcp.reproduce.fitting import GLOBAL_BATCH, fit_constants
from flexcp.reproduce.layouts import POLICY_MODES, Batch, cluster_of, cost_at
from flexcp.reproduce.result import Column, ExperimentSetup, Result, Table, Value
from flexcp.simulate.conditions import Conditions
from flexcp.simulate.costs import StepCosts
from flexcp.simulate.tasks import run_tasks

MODEL, DATA, RANKS = "qwen3-8b", "github", 64  # the paper names none for this table
DRAWS = 10
_LEAST = 0.05  # a factor is never below: a coefficient is positive


@dataclass(frozen=True, slots=True)
class Robustness:
    """What noise does to the plans of one policy.

    Attributes:
        same_packs: share of packs that keep their samples and their degree.
        same_plans: share of plans in which all do.
        slower, slowest: mean and largest excess over the plan made with the right coefficients, of the tasks
            alone; below 0 where a wrong coefficient gave a better plan.
        slower_step: the mean of whole steps, which have fixed seconds too.
    """

    same_packs: float
    same_plans: float
    slower: float
    slower_step: float
    slowest: float


def run(setup: ExperimentSetup) -> Result:
    """Both policies at every published noise."""
    constants = fit_constants(setup.published, setup.steps, setup.seed, setup.progress)
    batches = constants.workload(DATA).batches(GLOBAL_BATCH, setup.steps, setup.seed)
    cost, cluster = cost_at(MODEL, constants.speed), cluster_of(RANKS)
    cases = [(row, policy) for row in setup.published.noise for policy in ("paper", "flexcp")]
    rows: list[dict[str, Value]] = []
    for number, (row, policy) in enumerate(cases):
        setup.progress("noise", number, len(cases))
        found = robustness(batches, cluster, cost, policy, row.sigma, setup.seed, constants.fixed_s)
        rows.append(
            {
                "sigma": row.sigma,
                "policy": policy,
                "published_same": row.same_plan if policy == "paper" else None,
                "same_packs": found.same_packs,
                "same_plans": found.same_plans,
                "published_slower": row.slower if policy == "paper" else None,
                "slower": found.slower,
                "slower_step": found.slower_step,
                "slowest": found.slowest,
            }
        )
    setup.progress("noise", len(cases), len(cases))
    title = f"Gaussian noise on every coefficient, {MODEL} on {DATA}, {DRAWS} draws × {setup.steps} steps"
    return Result("noise", setup, constants, (Table(title, _COLUMNS, tuple(rows)),), _NOTES)


def robustness(
    batches: Sequence[Batch],
    cluster: Cluster,
    cost: CostModel,
    policy: str,
    sigma: float,
    seed: int,
    fixed_s: float = 0.0,
) -> Robustness:
    """Plan every batch under `DRAWS` sets of wrong coefficients, and price each plan under `cost`."""
    mode = POLICY_MODES[policy]
    same, equal, excess, of_step = [], [], [], []
    for batch in batches:
        right = make_plan(batch, cluster, cost, policy=policy, mode=mode)
        expected = packs(right)
        random = np.random.default_rng(seed)
        for _ in range(DRAWS):
            plan = make_plan(batch, cluster, disturbed(cost, sigma, random), policy=policy, mode=mode)
            lost_s = replay_s(plan, cost) - right.step_s
            same.append(len(packs(plan) & expected) / len(expected))
            equal.append(packs(plan) == expected)
            excess.append(lost_s / right.step_s)
            of_step.append(lost_s / (right.step_s + fixed_s))
    return Robustness(fmean(same), fmean(equal), fmean(excess), fmean(of_step), max(excess))


def packs(plan: Plan) -> set[tuple[tuple[int, ...], int]]:
    """Samples and degree of every pack."""
    return {(task.samples, task.degree) for task in plan.tasks}


def disturbed(cost: CostModel, sigma: float, random: np.random.Generator) -> CostModel:
    """Every coefficient times 1 + sigma · N(0, 1), each with a draw of its own, at least 0.05."""
    f = np.maximum(_LEAST, 1 + sigma * random.standard_normal(9)).tolist()
    intra = Link(cost.intra.bytes_per_s * f[5], cost.intra.latency_s * f[6])
    inter = Link(cost.inter.bytes_per_s * f[7], cost.inter.latency_s * f[8])
    return replace(
        cost,
        pair_s=cost.pair_s * f[0],
        token_s=cost.token_s * f[1],
        sample_s=cost.sample_s * f[2],
        pack_s=cost.pack_s * f[3],
        ring_step_s=cost.ring_step_s * f[4],
        intra=intra,
        # Nobody would believe a measurement in which the network is faster than the node.
        inter=Link(min(inter.bytes_per_s, intra.bytes_per_s), max(inter.latency_s, intra.latency_s)),
    )


def replay_s(plan: Plan, cost: CostModel) -> float:
    """Seconds of a plan's tasks, on their ranks and in their order, under other coefficients."""
    costs = StepCosts(plan, 0, cost, Conditions())
    return float(run_tasks(plan, costs.seconds).end_s.max())


_COLUMNS = (
    Column("sigma", "noise", ".0%"),
    Column("policy", "policy"),
    Column("published_same", "same, published"),
    Column("same_packs", "same packs", ".1%"),
    Column("same_plans", "same plans", ".1%"),
    Column("published_slower", "slower, published"),
    Column("slower_step", "slower, step", "+.1%"),
    Column("slower", "slower, tasks", "+.1%"),
    Column("slowest", "tasks, worst", "+.1%"),
)
_NOTES = (
    "Same packs: those that keep their samples and their degree.",
    (
        "Slower: the plan under the right coefficients, over the plan made with them; means, of the "
        "whole step with its fixed seconds, and of its tasks alone."
    ),
    "The paper does not say what counts as the same plan.",
)
