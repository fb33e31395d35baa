"""What holds for every plan of every policy, on random batches, clusters and cost models."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies import problems

from flexcp.core.cluster import Cluster
from flexcp.core.layout import default_whole_below_tokens
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Link
from flexcp.planner import MODES, check, lower_bound_s, make_plan
from flexcp.planner.exhaustive import MAX_RANKS, MAX_SAMPLES, optimum_s
from flexcp.planner.policies.flexcp import CLOSE_ENOUGH
from flexcp.planner.problem import Problem

ROUNDING = 1 + 1e-9
MODE = st.sampled_from(MODES)
POLICIES = ("flexcp", "paper", "static")  # the others may refuse: tests/unit/test_policies_*.py
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
SHORT = settings(max_examples=60, **QUIET)
LONG = settings(max_examples=400, **QUIET)


def plans(problem, mode):
    batch, cluster, cost = problem
    return {policy: make_plan(batch, cluster, cost, policy=policy, mode=mode) for policy in POLICIES}


def bound_of_rings_s(problem, mode):
    """What the search of flexcp goes by."""
    batch, cluster, cost = problem
    whole_below_tokens = default_whole_below_tokens(cluster.tokens_per_rank)
    return lower_bound_s(Problem.of(batch, cluster, cost, mode, whole_below_tokens))


def assert_every_plan_valid_and_ordered(problem, mode):
    made = plans(problem, mode)
    for plan in made.values():
        assert check(plan, problem[2]) == ()
        assert sorted(k for task in plan.tasks for k in task.samples) == list(range(len(problem[0])))
    assert made["flexcp"].bound_s <= made["flexcp"].step_s * ROUNDING
    bound_s = bound_of_rings_s(problem, mode)
    others_s = min(made["paper"].step_s, made["static"].step_s)
    assert made["flexcp"].step_s <= max(others_s, CLOSE_ENOUGH * bound_s)


def assert_the_optimum_lies_between(problem, mode):
    batch, cluster, cost = problem
    made = plans(problem, mode)
    whole_below_tokens = made["flexcp"].whole_below_tokens
    of_rings_s = optimum_s(batch, cluster, cost, whole_below_tokens, mode)
    optimum = optimum_s(batch, cluster, cost, whole_below_tokens, mode, any_exchange=True)
    assert made["flexcp"].bound_s <= of_rings_s * ROUNDING
    assert optimum <= made["flexcp"].step_s * ROUNDING


def tiny(max_samples=MAX_SAMPLES):
    return problems(max_samples=max_samples, max_ranks=MAX_RANKS, max_tokens=24)


@SHORT
@given(problems(), MODE)
def test_bound_flexcp_others_in_this_order_and_all_valid(problem, mode):
    assert_every_plan_valid_and_ordered(problem, mode)


@pytest.mark.slow
@LONG
@given(problems(max_samples=120, max_ranks=70, max_tokens=2000), MODE)
def test_bound_flexcp_others_in_this_order_and_all_valid_long(problem, mode):
    assert_every_plan_valid_and_ordered(problem, mode)


@SHORT
@given(tiny(4), MODE)
def test_bound_optimum_flexcp_in_this_order(problem, mode):
    assert_the_optimum_lies_between(problem, mode)


@pytest.mark.slow
@LONG
@given(tiny(), MODE)
def test_bound_optimum_flexcp_in_this_order_long(problem, mode):
    assert_the_optimum_lies_between(problem, mode)


@SHORT
@given(problems(max_samples=20), MODE, st.sampled_from(sorted(POLICIES)), st.randoms())
def test_order_and_names_of_samples_change_nothing(problem, mode, policy, shuffler: random.Random):
    batch, cluster, cost = problem
    shuffled = list(batch)
    shuffler.shuffle(shuffled)
    renamed = [replace(sample, id=1000 - sample.id) for sample in shuffled]
    one = make_plan(batch, cluster, cost, policy=policy, mode=mode)
    other = make_plan(renamed, cluster, cost, policy=policy, mode=mode)
    assert (one.step_s, one.bound_s) == (other.step_s, other.bound_s)
    assert [task.ranks for task in one.tasks] == [task.ranks for task in other.tasks]


@SHORT
@given(problems(max_samples=20), MODE, st.sampled_from(sorted(POLICIES)))
def test_planning_twice_gives_the_same_plan_and_json_keeps_it(problem, mode, policy):
    batch, cluster, cost = problem
    plan = make_plan(batch, cluster, cost, policy=policy, mode=mode)
    again = make_plan(batch, cluster, cost, policy=policy, mode=mode)
    assert plan == again
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.digest == again.digest


@SHORT
@given(problems(max_samples=12))
def test_free_running_is_no_slower_than_lockstep_or_close_to_the_bound(problem):
    batch, cluster, cost = problem
    lockstep = make_plan(batch, cluster, cost, mode="lockstep")
    free = make_plan(batch, cluster, cost, mode="free-running")
    bound_s = bound_of_rings_s(problem, "free-running")
    assert free.step_s <= max(lockstep.step_s, 1.03 * bound_s) * ROUNDING


@SHORT
@given(problems(max_samples=30), MODE, st.data())
def test_speeds_are_honoured_and_only_their_ratios_shape_a_plan(problem, mode, data):
    batch, cluster, cost = problem
    speed = st.sampled_from([0.1, 0.5, 1.0, 2.0])
    speeds = tuple(data.draw(st.lists(speed, min_size=cluster.ranks, max_size=cluster.ranks)))
    slow, twice = replace(cluster, speeds=speeds), replace(cluster, speeds=tuple(2 * s for s in speeds))
    plan, faster = (make_plan(batch, c, cost, mode=mode) for c in (slow, twice))
    assert check(plan, cost) == check(faster, cost) == ()
    assert plan.bound_s <= plan.step_s * ROUNDING
    assert faster.step_s == pytest.approx(plan.step_s / 2, rel=1e-9)
    assert faster.bound_s == pytest.approx(plan.bound_s / 2, rel=1e-9)


def test_one_token_a_rank():
    """E = 1: nothing may stay whole, every token has a rank of its own."""
    batch = [Sample(0, 3), Sample(1, 1), Sample(2, 2)]
    model = CostModel(1e-3, 1e-2, 0.0, 1e-2, 0.0, 1.0, 1, Link(1e6, 0.0), Link(1e6, 0.0))
    plan = make_plan(batch, Cluster(3, 1), model)
    assert check(plan, model) == ()
    assert plan.num_waves == 2
