"""Packing, allocation, filling, placement, bounds and exhaustive search, each on cases worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import clusters, cost_models, samples, time_tables

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, InfeasibleError
from flexcp.core.layout import make_layout
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.cost.model import CostModel, Link, Load
from flexcp.planner import check, make_plan
from flexcp.planner.allocation import dynamic_programme, threshold
from flexcp.planner.balance import Slot, fill, shelves
from flexcp.planner.bounds import lower_bound, lower_bound_s
from flexcp.planner.degrees import Ladder, long_samples
from flexcp.planner.exhaustive import optimum_s
from flexcp.planner.list_schedule import Layout, list_schedule, scheduled_tasks
from flexcp.planner.packing import best_fit_decreasing
from flexcp.planner.placement import crosses_nodes, place
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import fill_s, makespan_s

FREE = Link(1e30, 0.0)
COST = CostModel(1e-3, 1.0, 0.0, 0.5, 0.0, 1.0, 1, FREE, FREE)


def problem_of(lengths, cluster, cost=COST, mode="lockstep", whole_below_tokens=0):
    return Problem.of(samples_from_lengths(lengths), cluster, cost, mode, whole_below_tokens)


def list_scheduled(problem, share):
    bound_s = lower_bound_s(problem)
    samples = long_samples(problem, 0.0)
    made = list_schedule(problem, samples, bound_s, Layout(share, problem.cluster.ranks_per_node))
    return scheduled_tasks(problem, made)


def tokens_by_pack(problem, packs):
    return [([problem.loads[k].tokens for k in pack.samples], pack.degree) for pack in packs]


def test_best_fit_takes_the_tightest_bin_and_opens_bins_of_the_least_degree():
    problem = problem_of([25, 17, 3, 2, 9, 4], Cluster(8, 10))
    # 25 opens 30, 17 opens 20, 9 opens 10; 4 fits only beside 25, 3 beside 17, 2 nowhere tight but 25 + 4.
    assert tokens_by_pack(problem, best_fit_decreasing(problem)) == [
        ([25, 4], 3),
        ([17, 3], 2),
        ([9], 1),
        ([2], 1),
    ]


@settings(deadline=None)
@given(samples(max_tokens=200), clusters(max_tokens=64), st.data())
def test_a_pack_that_is_said_to_fit_fits_row_by_row(batch, cluster, data):
    whole_below = data.draw(st.integers(0, cluster.tokens_per_rank // 2))
    problem = Problem.of(batch, cluster, COST, "lockstep", whole_below)
    least = problem.min_degree(sum(problem.loads, Load()))
    for degree in (least, least + 1, 2 * least):
        assert make_layout(batch, degree, whole_below).max_rows <= cluster.tokens_per_rank


@settings(deadline=None)
@given(samples(max_tokens=1000, min_size=1, max_size=1), clusters(max_tokens=64), st.data())
def test_the_least_degree_of_one_sample_is_exact(batch, cluster, data):
    whole_below = data.draw(st.integers(0, cluster.tokens_per_rank // 2))
    least = Problem.of(batch, cluster, COST, "lockstep", whole_below).min_degree(
        Load.of(batch[0], whole_below)
    )
    assert least == cluster.min_degree(batch[0].tokens)
    if least > 1:
        assert make_layout(batch, least - 1, whole_below).max_rows > cluster.tokens_per_rank


def test_indivisible_samples_can_need_more_ranks_than_their_tokens_say():
    # Five whole samples of 4 on ranks of 10: 20 tokens, but two ranks take only two samples each.
    problem = problem_of([4] * 5, Cluster(4, 10), whole_below_tokens=5)
    assert problem.min_degree(sum(problem.loads, Load())) == 3
    assert make_layout(samples_from_lengths([4] * 5), 2, 5).max_rows == 12


def slowest_s(table_s, degrees):
    return max(row[degree - 1] for row, degree in zip(table_s, degrees, strict=True))


@settings(deadline=None)
@given(time_tables())
def test_threshold_and_dynamic_programme_agree_and_respect_the_ranks(table_s):
    by_threshold, by_programme = threshold(table_s), dynamic_programme(table_s)
    assert sum(by_threshold) <= table_s.shape[1]
    assert sum(by_programme) <= table_s.shape[1]
    assert slowest_s(table_s, by_threshold) == slowest_s(table_s, by_programme)
    assert sum(by_threshold) <= sum(by_programme)


@pytest.mark.parametrize("solve", [threshold, dynamic_programme])
def test_too_many_ranks_at_a_time_is_an_error_with_the_sum(solve):
    table_s = np.array([[np.inf, 1.0, 1.0], [np.inf, 1.0, 1.0]])
    with pytest.raises(InfeasibleError, match="2 packs need 4 ranks at a time, there are 3"):
        solve(table_s)
    with pytest.raises(InfeasibleError):
        solve(np.full((1, 3), np.inf))


def test_ranks_that_do_not_help_stay_idle():
    table_s = np.array([[4.0, 5.0, 3.0, 6.0], [3.0, 3.0, 3.0, 3.0]])
    assert threshold(table_s) == dynamic_programme(table_s) == (3, 1)


def test_filling_takes_the_emptiest_slot_with_room_and_reports_failure():
    problem = problem_of([8, 7, 3, 2], Cluster(2, 10))
    slots = [Slot(0.0, 10, 1), Slot(0.0, 10, 1)]
    assert fill(slots, [0, 1, 2, 3], problem)
    assert [slot.samples for slot in slots] == [[0, 3], [1, 2]]
    assert [slot.room_tokens for slot in slots] == [0, 0]
    assert not fill([Slot(0.0, 10, 1), Slot(0.0, 9, 1)], [0, 1, 2, 3], problem)


def test_shelves_put_like_durations_together():
    problem = problem_of([9, 8, 3, 2], Cluster(2, 10))
    waves = shelves([problem.pack([k], 1) for k in (3, 0, 2, 1)], problem)
    assert [[pack.samples for pack in wave] for wave in waves] == [[(0,), (1,)], [(2,), (3,)]]


@settings(deadline=None)
@given(clusters(max_ranks=40), st.data())
def test_groups_are_disjoint_ascending_and_stay_in_a_node_where_one_has_room(cluster, data):
    degrees, left = [], cluster.ranks
    while left and data.draw(st.booleans()):
        degrees.append(data.draw(st.integers(1, left)))
        left -= degrees[-1]
    groups = place(degrees, cluster)
    assert [len(group) for group in groups] == degrees
    ranks = [rank for group in groups for rank in group]
    assert len(set(ranks)) == len(ranks)
    assert all(0 <= rank < cluster.ranks for rank in ranks)
    assert all(list(group) == sorted(group) for group in groups)
    if (
        all(cluster.ranks_per_node % degree == 0 for degree in degrees)
        and cluster.ranks % cluster.ranks_per_node == 0
    ):
        assert not any(crosses_nodes(group, cluster) for group in groups)


def test_a_wave_wider_than_the_cluster_cannot_be_placed():
    with pytest.raises(InfeasibleError, match="a wave needs 5 ranks, there are 4"):
        place([3, 2], Cluster(4, 1))


def test_the_work_bound_counts_the_waves_that_memory_forces():
    # 40 tokens on 2 ranks of 10: two waves. Work: 4 * (55e-3 + 10) s on 2 ranks, and 2 * 0.5 s of packs.
    assert lower_bound_s(problem_of([10] * 4, Cluster(2, 10))) == pytest.approx(2 * (10.055 + 0.5))
    free = problem_of([10] * 4, Cluster(2, 10), mode="free-running")
    assert lower_bound_s(free) == pytest.approx(2 * (10.055 + 0.5))
    roomy = problem_of([10] * 4, Cluster(2, 100))
    assert lower_bound_s(roomy) == pytest.approx(2 * 10.055 + 0.5)


def test_the_longest_sample_bounds_a_batch_it_dominates():
    slow = Link(0.5, 0.0)
    cost = CostModel(1e-3, 1.0, 0.0, 0.5, 0.0, 1.0, 1, slow, slow)
    problem = problem_of([20, 1], Cluster(4, 20), cost)
    # Alone: 20.71 s on one rank, 20 + 10 + 0.5 s on two.
    assert lower_bound_s(problem) == pytest.approx(20.71)


def test_two_samples_of_more_than_half_the_cluster_run_one_after_the_other():
    problem = problem_of([21, 21], Cluster(4, 10))
    alone_s = (21 + 0.231) / 4 + 0.5
    assert lower_bound_s(problem) == pytest.approx(2 * alone_s)


def test_the_optimum_of_four_equal_samples_on_two_ranks():
    # One wave of two packs of two, or of one pack of four on both ranks: the same 2 * 10.055 + 0.5 s.
    optimum = optimum_s(samples_from_lengths([10] * 4), Cluster(2, 20), COST, 0)
    assert optimum == pytest.approx(2 * 10.055 + 0.5)
    assert optimum_s(samples_from_lengths([10] * 4), Cluster(2, 10), COST, 0) == pytest.approx(
        2 * (10.055 + 0.5)
    )


def test_the_optimum_is_infinite_where_no_plan_exists_and_refuses_large_inputs():
    assert optimum_s([Sample(0, 41)], Cluster(4, 10), COST, 0) == np.inf
    with pytest.raises(ConfigError, match="6 samples on 4 ranks"):
        optimum_s(samples_from_lengths([1] * 6), Cluster(4, 10), COST, 0)


def test_a_list_schedule_fills_the_time_before_and_after_rings():
    # Memory makes rings of the long samples; the short ones need several packs on one rank.
    problem = problem_of([60, 30, *[9] * 20], Cluster(4, 20), mode="free-running")
    made = list_scheduled(problem, 1.0)
    assert sorted(k for task in made for k in task.samples) == list(range(22))
    assert {task.samples: task.degree for task in made if task.degree > 1} == {(0,): 3, (1,): 2}
    assert max(len(task.samples) for task in made if task.degree == 1) == 2
    assert makespan_s(made) <= 1.1 * lower_bound_s(problem)


def test_rings_stay_inside_a_node():
    problem = problem_of([39, 38, 37], Cluster(6, 20, ranks_per_node=3), mode="free-running")
    rings = [task.ranks for task in list_scheduled(problem, 2.0)]
    assert rings == [(0, 1), (3, 4), (3, 4)]
    assert not any(crosses_nodes(ring, problem.cluster) for ring in rings)


@settings(deadline=None)
@given(
    samples(max_tokens=300, max_size=12, spans=False),
    clusters(max_ranks=40, min_tokens=20),
    cost_models(),
    st.data(),
)
def test_the_ladder_finds_what_a_full_table_finds(batch, cluster, cost, data):
    batch = [sample for sample in batch if sample.tokens <= cluster.capacity_tokens] or [Sample(0, 1)]
    problem = Problem.of(batch, cluster, cost, "lockstep", data.draw(st.sampled_from([0, 5])))
    least = np.array([problem.min_degree(load) for load in problem.loads])
    rungs = Ladder(cost, problem.columns, least, cluster.ranks, cluster.ranks_per_node)
    searched = Ladder(cost, problem.columns, least, cluster.ranks, cluster.ranks_per_node)
    searched.__dict__["tabled"] = min(cluster.ranks, cluster.ranks_per_node)  # the rest is bisected
    table_s = problem.table_s(problem.loads)
    assert rungs.best_s.tolist() == table_s.min(axis=1).tolist()
    np.testing.assert_allclose(searched.best_s, table_s.min(axis=1), rtol=1e-12)
    limits_s = table_s.min(axis=1) * data.draw(st.sampled_from([1.0 + 1e-9, 1.1, 2.0]))
    expected = (table_s <= limits_s[:, None]).argmax(axis=1) + 1
    assert rungs.degrees(limits_s).tolist() == expected.tolist()
    assert searched.degrees(limits_s).tolist() == expected.tolist()


def test_wide_rings_take_whole_nodes_and_cross_few_links():
    problem = problem_of([119, 119, 38], Cluster(24, 10, ranks_per_node=8), mode="free-running")
    rings = {task.samples: task.ranks for task in list_scheduled(problem, 2.0)}
    assert [len(ring) for ring in rings.values()] == [12, 12, 4]
    assert all(len({rank // 8 for rank in ring}) == -(-len(ring) // 8) for ring in rings.values())


def test_a_slow_node_gets_less_work():
    speeds = (1.0,) * 4 + (0.5,) * 4
    cluster = Cluster(8, 100, ranks_per_node=4, speeds=speeds)
    lengths = [10 + k % 7 for k in range(200)]
    problem = problem_of(lengths, cluster, mode="free-running")
    made = list_scheduled(problem, 1.0)
    counts = [0, 0]
    for task in made:
        counts[task.ranks[0] // 4] += sum(lengths[k] for k in task.samples)
    assert 1.8 < counts[0] / counts[1] < 2.2
    assert makespan_s(made) <= 1.03 * lower_bound_s(problem)


@pytest.mark.parametrize("speeds", [(1.0,) * 8 + (0.5,) * 8, (1.0,) * 15 + (0.4,)])
def test_lockstep_gives_slow_ranks_less_work(speeds):
    lengths = [300, 200, 150, *[10 + k % 37 for k in range(300)]]
    batch = samples_from_lengths(lengths)
    slow, alike = Cluster(16, 60, 8, speeds), Cluster(16, 60, 8)
    knowing = make_plan(batch, slow, COST, mode="lockstep")
    unknowing = make_plan(batch, alike, COST, mode="lockstep")
    assert check(knowing, COST) == ()
    waves_s = [max(task.duration_s / slow.speed(task.ranks) for task in wave) for wave in unknowing.waves]
    assert knowing.step_s < 0.85 * sum(waves_s)
    assert knowing.gap < 1.25


def test_the_wave_of_the_longest_sample_bounds_what_runs_beside_it():
    """By hand: two ranks are best for 16 tokens, and their messages leave no time for others.

    On 2 ranks: attention 136 / 2 = 68 s is hidden by 10 * 8 = 80 s of messages; 16 / 2 = 8 s of linear work.
    The other two ranks hold 2 * 10 tokens: two samples of 8, and 4 tokens of a third, of 36 + 8 s each.
    Samples that join the ring cost at least 8 + 8 * 10 rank-seconds and bring 44. So 3 - 4 / 8 samples wait.
    """
    slow = Link(1.0, 0.0)
    cost = CostModel(1.0, 1.0, 0.0, 0.0, 0.0, 10.0, 1, slow, slow)
    problem = problem_of([16, *[8] * 5], Cluster(4, 10), cost)
    assert cost.times_s(problem.loads[0], 2).tolist() == [152.0, 88.0]
    bound = lower_bound(problem)
    assert bound.seconds == pytest.approx(88 + 2.5 * 44 / 4)
    assert "no room for beside it" in bound.reason


@settings(max_examples=30, deadline=None)
@given(samples(), clusters(), cost_models(), st.integers(1, 5))
def test_a_pipeline_adds_its_longest_wave_for_every_further_stage(given, cluster, cost, stages):
    """Against waves that are passed on from stage to stage, one at a time each."""
    try:
        plan = make_plan(given, cluster, cost, mode="lockstep")
    except InfeasibleError:
        return
    ended = [0.0] * stages
    for wave in plan.waves:
        before = 0.0
        for stage in range(stages):
            before = ended[stage] = max(before, ended[stage]) + max(task.duration_s for task in wave)

    assert plan.step_s + fill_s(plan, stages) == pytest.approx(ended[-1])
