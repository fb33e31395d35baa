"""The rival policies: each legal, within memory, the same every time, and true to what it is named after."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.strategies import problems

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InfeasibleError, UnsupportedError
from flexcp.core.layout import heads_divide
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.core.sample import samples_from_lengths
from flexcp.cost import cost_model, hardware
from flexcp.cost.model import Link, Load
from flexcp.planner import MODES, check, make_plan
from flexcp.planner.policies import static
from flexcp.planner.policies.megatron_dynamic import _next_wave, _power_of_two
from flexcp.planner.policies.ulysses import allowed_degrees
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import assignment_s

LENGTHS = json.loads((Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json").read_text())
RIVALS = ("ulysses", "flexsp", "megatron-dynamic")
COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
SHORT = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def lengths(size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(LENGTHS, size)


def power_of_two(degree: int) -> bool:
    return degree & (degree - 1) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", RIVALS)
def test_real_lengths_are_planned_legally_and_alike_twice(policy, mode):
    """Memory, order, times and bound hold on a real long tail; the second plan equals the first."""
    samples, cluster = samples_from_lengths(lengths(60)), Cluster(16, 8192)
    plan = make_plan(samples, cluster, COST, policy=policy, mode=mode)

    assert check(plan, COST) == ()
    assert plan == make_plan(samples, cluster, COST, policy=policy, mode=mode)


@SHORT
@given(problems(max_samples=14, max_ranks=16), st.sampled_from(MODES), st.sampled_from(RIVALS[1:]))
def test_any_problem_is_planned_legally_or_refused_with_its_degree(problem, mode, policy):
    """Powers of two only, and a refusal exactly where the next one exceeds the ranks, or the heads."""
    samples, cluster, cost = problem
    needed = max(cluster.min_degree(sample.tokens) for sample in samples)
    degree, refusal = _power_of_two(needed), ""
    if degree > cluster.ranks:
        refusal = f"needs degree {degree}, the next power"
    elif policy == "flexsp" and not heads_divide(cost.heads, cost.kv_heads, degree):
        refusal = f"needs degree {degree}, heads allow"
    if policy == "flexsp" and not cost.heads:
        refusal = "no head counts"
    if refusal:
        with pytest.raises((InfeasibleError, UnsupportedError), match=refusal):
            make_plan(samples, cluster, cost, policy=policy, mode=mode)
        return
    plan = make_plan(samples, cluster, cost, policy=policy, mode=mode)

    assert check(plan, cost) == ()
    assert all(power_of_two(degree) for degree in plan.degrees)


@pytest.mark.parametrize("policy", RIVALS)
def test_flexcp_is_no_slower_under_the_same_exchange(policy):
    """Under one cost model, real lengths, both kinds of memory."""
    samples = samples_from_lengths(lengths(100))
    for tokens in (8192, 16384):
        rival = make_plan(samples, Cluster(32, tokens), COST, policy=policy, mode="free-running")
        ours = make_plan(samples, Cluster(32, tokens), COST, mode="free-running")
        assert ours.step_s <= rival.step_s


# ------------------------------------------------------------------------------------------------ ulysses


def test_ulysses_refuses_what_the_heads_forbid_and_names_both():
    """D29: 40 query and 8 key/value heads allow degree 8 on 64 ranks, not the 37 that memory asks for."""
    cost = cost_model(ModelShape("m", 40, 5120, 40, 8, 128, 13824, 32000), hardware("h100"))
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(samples_from_lengths([300_000]), Cluster(64, 8192), cost, policy="ulysses")

    assert refusal.value.cause == "needs degree 37, heads allow 8 (40 query, 8 key/value heads, 64 ranks)"
    assert refusal.value.remedy.endswith("raise the tokens per rank to 37500.")


def test_ulysses_degrees_divide_query_heads_and_fit_key_value_heads():
    """D29: no degree that a head count forbids, for every preset head count and N."""
    for heads, kv_heads in ((32, 8), (28, 4), (16, 8), (40, 8), (25, 5)):
        for ranks in (8, 24, 48, 64, 100):
            degrees = allowed_degrees(heads, kv_heads, ranks)
            assert degrees[0] == 1
            assert all(heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0) for d in degrees)


@pytest.mark.parametrize("policy", ["ulysses", "flexsp"])
def test_who_exchanges_heads_needs_to_know_them(policy):
    """A cost model from bare coefficients has no heads, and says so."""
    bare = replace(COST, heads=0)
    with pytest.raises(UnsupportedError, match="no head counts"):
        make_plan(samples_from_lengths([500]), Cluster(8, 8192), bare, policy=policy)


@pytest.mark.parametrize("policy", ["ulysses", "flexsp"])
def test_plans_say_that_they_exchange_heads(policy):
    """So the engine does, and so the check times them; a degree that heads forbid is a violation."""
    plan = make_plan(samples_from_lengths([30_000, 16_000, 500]), Cluster(8, 8192), COST, policy=policy)

    assert plan.exchanges == {"all-to-all": sum(task.degree > 1 for task in plan.tasks)}
    assert check(plan, COST) == ()
    no_heads = check(plan, replace(COST, heads=27, kv_heads=27))
    assert any("exchanges 27 query and 27 key/value heads among" in violation for violation in no_heads)


def test_a_group_takes_the_fastest_exchange_that_it_may():
    """Waiting costs: a ring waits d - 1 times, a gather once, an all-to-all twice, where heads allow it."""
    slow = Link(1e12, 1.0)
    cost = replace(COST, intra=slow, inter=slow, heads=32, kv_heads=4)
    batch = samples_from_lengths([20_000])  # 5 ranks of 4096; 20000 x 4 keys <= 4096 x 32 queries

    def exchange(cost):
        plan = make_plan(batch, Cluster(5, 4096), cost)
        assert check(plan, cost) == ()
        return plan.tasks[0].exchange

    assert exchange(cost) == "gather"
    assert exchange(replace(cost, heads=16)) == "ring"  # keys would take more room than queries
    assert exchange(replace(cost, heads=10, kv_heads=10, head_bytes_per_token=0.0)) == "all-to-all"
    hidden = replace(cost, intra=Link(1e12, 0.0), inter=Link(1e12, 0.0), ring_step_s=0.0)
    assert exchange(hidden) == "gather"  # handles the sample twice, a ring in each of five steps
    assert exchange(replace(hidden, sample_s=0.0)) == "ring"


def test_all_to_all_is_not_hidden_and_repeats_key_value_heads():
    """By hand: 2 x 32 + 2 x 8 heads at degree 8, 2 x 32 + 2 x 16 at 16; nothing at degree 1."""
    load = Load.of(samples_from_lengths([8000])[0], 512)
    cost = COST.with_exchange("all-to-all")
    bare_s = (COST.pair_s * load.pairs + COST.token_s * load.tokens) / 8 + COST.sample_s + COST.pack_s
    sent = 36 * 3 * 128 * 2 * (2 * 32 + 2 * 8) * 1000 * 7 / 8
    waits_s = 36 * 3 * 2 * COST.intra.latency_s

    assert cost.task_s(load, 8) == pytest.approx(bare_s + sent / COST.intra.bytes_per_s + waits_s)
    assert cost.task_s(load, 1) == pytest.approx(COST.task_s(load, 1))
    wide = cost.task_s(load, 16, crosses_nodes=True)
    sent = 36 * 3 * 128 * 2 * (2 * 32 + 2 * 16) * 500 * 15 / 16
    bare_s = (COST.pair_s * load.pairs + COST.token_s * load.tokens) / 16 + COST.sample_s + COST.pack_s
    waits_s = 36 * 3 * 2 * COST.inter.latency_s
    assert wide == pytest.approx(bare_s + sent / COST.inter.bytes_per_s + waits_s)


# --------------------------------------------------------------------------------------- megatron-dynamic


def megatron_waves(tokens: list[int], ranks: int, tokens_per_rank: int) -> list[list[tuple]]:
    """Our waves before packing: first rank, degree and lengths of each group."""
    degrees = [_power_of_two(-(-length // tokens_per_rank)) for length in tokens]
    works = [length**2 / degree for length, degree in zip(tokens, degrees, strict=True)]
    left, waves = list(range(len(tokens))), []
    while left:
        groups, left = _next_wave(left, degrees, works, ranks)
        waves.append(sorted((g.first, g.degree, tuple(tokens[k] for k in g.samples)) for g in groups))
    return waves


@pytest.mark.parametrize("ranks", [8, 16, 64, 128])
def test_megatron_dynamic_makes_the_waves_of_the_real_scheduler(ranks):
    """Same degrees, ranks, samples and waves as BalancedCPScheduler of megatron-core 0.16."""
    module = pytest.importorskip(
        "megatron.core.pipeline_parallel.hybrid_cp_schedule", reason="megatron-core is not installed"
    )

    class Group:
        def size(self) -> int:
            return ranks

    for tokens_per_rank in (4096, 8192, 20_000):
        for size in (3, 60, 400):
            batch = sorted((min(x, ranks * tokens_per_rank) for x in lengths(size)), reverse=True)
            scheduler = module.BalancedCPScheduler(tokens_per_rank, Group())
            _, by_rank = scheduler.get_groups_and_subsamples(list(enumerate(batch)), None)
            real = []
            for wave in by_rank:
                groups: dict[tuple, list[int]] = {}
                for rank, ids in enumerate(wave):
                    groups.setdefault(tuple(ids), []).append(rank)
                real.append(sorted((r[0], len(r), tuple(batch[k] for k in ids)) for ids, r in groups.items()))
            assert megatron_waves(batch, ranks, tokens_per_rank) == real


def test_megatron_dynamic_by_hand():
    """8 ranks of 1000 tokens: 3000 needs 4 ranks, 1500 two, 900 one; the last empty rank widens the 900."""
    assert megatron_waves([3000, 1500, 900], 8, 1000) == [[(0, 4, (3000,)), (4, 2, (1500,)), (6, 2, (900,))]]
    assert megatron_waves([900], 8, 1000) == [[(0, 8, (900,))]]
    assert megatron_waves([900], 6, 1000) == [[(0, 4, (900,))]]  # the original fails on such N


def test_megatron_dynamic_blocks_are_aligned():
    """Every group is a block of a power of two that starts at a multiple of itself."""
    samples = samples_from_lengths(lengths(150))
    plan = make_plan(samples, Cluster(64, 8192), COST, policy="megatron-dynamic")

    for task in plan.tasks:
        assert power_of_two(task.degree)
        assert task.ranks == tuple(range(task.ranks[0], task.ranks[0] + task.degree))
        assert task.ranks[0] % task.degree == 0


# ------------------------------------------------------------------------------------------------- flexsp


def test_flexsp_is_optimal_where_the_answer_is_plain():
    """Four equal samples that need 2 of 8 ranks each: four groups of two, one wave."""
    plan = make_plan(samples_from_lengths([16_000] * 4), Cluster(8, 8192), COST, policy="flexsp")

    assert plan.degrees == {2: 4}
    assert plan.num_waves == 1


def test_flexsp_is_imported_by_nobody_else():
    """The solver costs half a second to import; planning by other policies never pays for it."""
    code = (
        "import sys; import flexcp.cli.plan; from flexcp.planner import make_plan;"
        "sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_long_sample_alone_with_its_messages_is_exchanged_by_heads():
    """Rings of 50,000 tokens wait for their links; heads are exchanged four times a layer at most."""
    samples, cluster = samples_from_lengths([50_000, 6_000, 300]), Cluster(4096, 23_000)
    cost = cost_model(model_shape("qwen3-8b"), hardware("h100"))
    for mode in MODES:
        best, heads = (make_plan(samples, cluster, cost, policy=p, mode=mode) for p in ("flexcp", "ulysses"))
        assert best.step_s <= heads.step_s
        assert check(best, cost) == ()
        assert best.gap == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_no_one_degree_beats_static(mode):
    """Whatever `--current-cp` names: the fair baseline is the best of them, in the mode that is compared."""
    samples, cluster = samples_from_lengths([4096] * 512), Cluster(24, 16_384)
    cost = cost_model(model_shape("qwen3-8b"), hardware("h100"))
    best_s = make_plan(samples, cluster, cost, policy="static", mode=mode).step_s
    problem = Problem.of(samples, cluster, cost, mode, 512)
    for degree in (1, 2, 3, 4, 6, 8, 12, 24):
        steps_s = [assignment_s(problem, layout) for layout in static.with_degree(problem, degree)]
        assert best_s <= min(steps_s) * (1 + 1e-12)
