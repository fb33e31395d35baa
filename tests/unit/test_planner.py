"""The call that makes a plan: examples with known answers, errors in words, every presets' edge sizes."""

import json
import pickle
import random

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, LengthsError, SampleTooLongError, UnknownNameError
from flexcp.core.model_shape import model_shape
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.cost import CostModel, Link, cost_model, hardware
from flexcp.planner import MODES, POLICIES, Planner, check, make_plan

COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
SERVING = ("flexcp", "paper", "static")  # the others may refuse: test_policies_rivals.py


def plan_of(lengths, cluster, **options):
    return make_plan(samples_from_lengths(lengths), cluster, COST, **options)


@pytest.mark.parametrize("policy", SERVING)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("lengths", "ranks"),
    [
        ([300, 6000, 50000], 8),
        ([1], 1),
        ([100], 64),
        ([8192 * 7], 7),  # needs every rank of a prime number of them
        ([8192 * 100, 5], 100),
        ([4096] * 64, 16),
        ([8192] * 5, 3),
        ([511, 512, 513] * 7, 2),
        ([40000, 40000, 40000], 8),  # each needs more than half: three waves
        ([20000, 15000, 9000, 100, 100], 5),
    ],
)
def test_every_policy_plans_it_correctly(policy, mode, lengths, ranks):
    plan = plan_of(lengths, Cluster(ranks, 8192), policy=policy, mode=mode)
    assert check(plan, COST) == ()
    assert (plan.policy, plan.mode) == (policy, mode)
    assert plan.gap >= 1 - 1e-9


@pytest.mark.parametrize(("tokens", "degree"), [(131072, 16), (131073, 17)])
@pytest.mark.parametrize("policy", ["paper", "flexcp"])
def test_exact_powers_and_one_more(tokens, degree, policy):
    # With ring traffic this dear, nobody takes a rank more than memory asks for.
    dear = Link(1e3, 1.0)
    cost = CostModel(1e-12, 1e-9, 0.0, 0.0, 0.0, 1e3, 1, dear, dear)
    plan = make_plan([Sample(0, tokens)], Cluster(64, 8192), cost, policy=policy)
    assert [task.degree for task in plan.tasks] == [degree]


def test_the_long_sample_gets_a_ring_and_the_short_ones_do_not_wait_for_it():
    plan = plan_of([300, 6000, 50000], Cluster(16, 8192))
    degree = {position: task.degree for task in plan.tasks for position in task.samples}
    assert degree[2] >= 7
    assert degree[0] <= degree[1] < degree[2]


def test_an_unfilled_cluster_leaves_ranks_idle_rather_than_cutting_a_whole_sample():
    plan = plan_of([100, 100, 100], Cluster(8, 8192))
    assert sorted(task.degree for task in plan.tasks) == [1, 1, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sample_beyond_the_cluster_is_named_with_the_ranks_it_needs(policy):
    with pytest.raises(SampleTooLongError, match="sample 1 has 65537 tokens") as caught:
        plan_of([65537 - 1, 65537, 3], Cluster(8, 8192), policy=policy)
    assert caught.value.ranks_needed == 9


def test_errors_say_what_is_wrong():
    with pytest.raises(UnknownNameError, match="Did you mean 'paper'"):
        plan_of([1], Cluster(1, 8), policy="papers")
    with pytest.raises(UnknownNameError, match="unknown mode 'freerunning'"):
        plan_of([1], Cluster(1, 8), mode="freerunning")
    with pytest.raises(LengthsError, match="no samples"):
        make_plan([], Cluster(1, 8), COST)
    with pytest.raises(ConfigError, match="Choose 0 to 4"):
        plan_of([1], Cluster(1, 8), whole_below_tokens=5)


def test_the_default_threshold_is_half_a_small_rank():
    assert plan_of([5], Cluster(2, 100)).whole_below_tokens == 50
    assert plan_of([5], Cluster(2, 8192)).whole_below_tokens == 512


def test_a_planner_is_a_value_and_plans_alike_elsewhere():
    planner = Planner(Cluster(8, 8192), COST, policy="paper", mode="free-running", whole_below_tokens=64)
    batch = samples_from_lengths([9000, 100, 40000, 7])
    copy = pickle.loads(pickle.dumps(planner))
    assert copy == planner
    assert copy(batch).digest == planner(batch).digest


def test_a_plan_survives_json_to_the_bit():
    plan = make_plan(
        [Sample(7, 9000, ((10, 900),)), Sample(3, 100), Sample(9, 30000)], Cluster(5, 8192), COST
    )
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.digest == plan.digest
    assert json.loads(plan.to_json())["policy"] == "flexcp"


def test_free_running_starts_tasks_before_the_wave_is_over():
    tail = random.Random(0)
    lengths = [min(int(tail.lognormvariate(7.5, 1.5)) + 1, 60000) for _ in range(200)]
    lockstep = plan_of(lengths, Cluster(16, 8192), policy="paper", mode="lockstep")
    free = plan_of(lengths, Cluster(16, 8192), policy="paper", mode="free-running")
    assert lockstep.num_waves == free.num_waves > 1
    assert free.step_s < lockstep.step_s
    ends_s = [max(task.end_s for task in wave) for wave in free.waves]
    assert any(
        task.start_s < end_s for end_s, wave in zip(ends_s[:-1], free.waves[1:], strict=True) for task in wave
    )


@pytest.mark.parametrize(("mode", "gap"), [("lockstep", 1.12), ("free-running", 1.005)])
@pytest.mark.parametrize("tokens_per_rank", [8192, 16384])
def test_a_long_tailed_batch_comes_close_to_the_bound(tokens_per_rank, mode, gap):
    tail = random.Random(1)
    lengths = [min(int(tail.lognormvariate(7.3, 1.45)) + 1, 131072) for _ in range(512)]
    cluster = Cluster(64, tokens_per_rank)
    made = {policy: plan_of(lengths, cluster, policy=policy, mode=mode) for policy in SERVING}
    assert 1 <= made["flexcp"].gap <= gap
    assert made["flexcp"].step_s < 0.95 * min(made["paper"].step_s, made["static"].step_s)


def test_the_paper_policy_serves_clusters_beyond_the_dynamic_programme():
    lengths = [131072, *[9000] * 40, *[700] * 200]
    plan = plan_of(lengths, Cluster(300, 8192), policy="paper")
    assert check(plan, COST) == ()
    assert max(plan.degrees) >= 16


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("lengths", "cluster"),
    [
        ([1022, 13, 9, 7], Cluster(64, 16)),  # short samples that outlast an average wave
        ([60000], Cluster(8, 8192, 8, (0.5, *[1.0] * 7))),  # memory asks for the slow rank too
        ([70000] * 3 + [3000] * 50, Cluster(16, 8192, 8, (0.9,) * 8 + (1.0,) * 8)),
        ([12000, 100], Cluster(2, 8192, speeds=(1.0, 0.1))),
        ([3000] * 50 + [90000], Cluster(64, 8192, 8, (0.5,) * 64)),
    ],
)
def test_searches_end_whatever_the_ranks_are_like(lengths, cluster, mode):
    assert check(plan_of(lengths, cluster, mode=mode), COST) == ()


@pytest.mark.parametrize("lengths", [[5_000_000_000, 5], [10**9] * 30])
def test_pairs_that_64_bits_cannot_count_are_refused(lengths):
    with pytest.raises(LengthsError, match="more than can be counted"):
        plan_of(lengths, Cluster(8, 10**10))
