"""The simulator on steps small enough to work out by hand, and the records that it leaves."""

import json
from itertools import pairwise

import numpy as np
import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, PlanError, RankFailedError
from flexcp.core.model_shape import ModelShape
from flexcp.core.plan import Plan, Task
from flexcp.core.run_folder import RunInfo, read_info, read_reports, trace_path
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.core.trace import read_spans
from flexcp.cost.memory import SHARDINGS
from flexcp.cost.model import CostModel, Link
from flexcp.planner import make_plan
from flexcp.simulate import Collectives, Conditions, Failure, collectives, reduction_s, simulate
from flexcp.simulate.engine import Clock
from flexcp.simulate.folder import SimulatedFolder
from flexcp.simulate.pace import jitter

FREE = Link(float("inf"), 0.0)
# A token is a second of a rank, and nothing else takes time.
PLAIN = CostModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1, FREE, FREE)


def step_of(tasks, *, ranks, mode="free-running", ranks_per_node=8, speeds=()):
    """A plan from (tokens, ranks, wave) of each task; times in it are none of the simulator's business."""
    samples = tuple(Sample(index, tokens) for index, (tokens, _, _) in enumerate(tasks))
    placed = tuple(Task((i,), group, wave, 0.0, 1.0) for i, (_, group, wave) in enumerate(tasks))
    cluster = Cluster(ranks, 1000, ranks_per_node, speeds)
    return Plan("static", mode, cluster, 1, samples, placed, 1.0)


def run(plans, conditions=None, cost=PLAIN):
    """Steps and spans."""
    spans = []
    return list(simulate(plans, cost, conditions, spans.append)), spans


def ends_s(spans, name="task"):
    """End of the spans of a name, in the order recorded."""
    return [span.end_s for span in spans if span.name == name]


def test_cancelled_and_late_events_do_not_happen():
    """What is due after the time is up waits for ever; a cancelled event never comes."""
    clock, seen = Clock(), []
    clock.at(1.0, lambda: seen.append(1))
    clock.at(2.0, lambda: seen.append(2)).cancel()
    clock.at(3.0, lambda: seen.append(3))
    clock.at(3.5, lambda: seen.append(4))
    clock.run(until_s=3.0)

    assert (seen, clock.now_s) == ([1, 3], 3.0)


TWO_WAVES = [(4, (0,), 0), (2, (1,), 0), (2, (0,), 1), (6, (1, 2), 1), (5, (2,), 2)]


def test_free_running_waits_for_own_ranks_only():
    """Rank 1 joins rank 2 at 2 s; rank 0 goes on alone."""
    (step,), spans = run([step_of(TWO_WAVES, ranks=3)])

    assert ends_s(spans) == [4.0, 2.0, 6.0, 5.0, 5.0, 10.0]  # the fourth task on both its ranks
    assert step.report.measured_s == step.report.step_s == 10.0
    assert step.report.idle_share == pytest.approx(1 - (4 + 2 + 2 + 2 * 3 + 5) / 30)


def test_lockstep_waits_for_the_whole_wave():
    """Waves of 4, 3 and 5 seconds."""
    (step,), spans = run([step_of(TWO_WAVES, ranks=3, mode="lockstep")])

    assert ends_s(spans) == [4.0, 2.0, 6.0, 7.0, 7.0, 12.0]
    assert step.report.measured_s == 12.0


def test_a_circle_is_named():
    """Ranks that take their tasks in opposite order would wait for ever; the runtime would hang here."""
    plan = step_of([(4, (0, 1), 0), (4, (0, 1), 1)], ranks=2)
    lists = {0: (0, 1), 1: (1, 0)}
    plan.__dict__["_tasks_by_rank"] = lists

    with pytest.raises(PlanError, match=r"task 0 on ranks \[0, 1\] waits in a circle"):
        run([plan])


def test_a_slow_rank_slows_its_groups():
    """Rank 2 at half speed doubles the tasks it is in, and delays nobody else."""
    (step,), spans = run([step_of(TWO_WAVES, ranks=3)], Conditions(speeds={2: 0.5}))

    assert ends_s(spans) == [4.0, 2.0, 6.0, 8.0, 8.0, 18.0]
    assert step.time.pace_s == pytest.approx(2 * 3 + 5)


def test_speeds_of_the_plan_hold_unless_told_otherwise():
    """A speed given for one rank replaces the plan's; the others stay."""
    plan = step_of([(4, (0,), 0), (4, (1,), 0)], ranks=2, speeds=(2.0, 0.5))

    assert ends_s(run([plan])[1]) == [2.0, 8.0]
    assert ends_s(run([plan], Conditions(speeds={1: 4.0}))[1]) == [2.0, 1.0]


def test_jitter_is_reproducible_and_of_mean_one():
    """A function of seed and step; a group takes its slowest member."""
    factors = jitter(100_000, 0.2, seed=3, step=5)

    assert factors.mean() == pytest.approx(1.0, abs=0.005)
    assert np.log(factors).std() == pytest.approx(0.2, rel=0.02)
    assert np.array_equal(factors, jitter(100_000, 0.2, seed=3, step=5))
    assert not np.array_equal(factors, jitter(100_000, 0.2, seed=3, step=6))
    assert not np.array_equal(factors, jitter(100_000, 0.2, seed=4, step=5))
    plan = step_of([(4, (0,), 0), (8, (1, 2), 0)], ranks=3)
    _, spans = run([plan], Conditions(jitter=0.2, seed=3))
    own = jitter(3, 0.2, seed=3, step=0)
    assert ends_s(spans) == pytest.approx([4 * own[0], 4 * max(own[1:]), 4 * max(own[1:])])


# One second of messages for 100 tokens on two ranks: 1 step, 50 tokens of 4 bytes, 200 bytes/s.
RINGS = CostModel(0.0, 0.02, 0.0, 0.0, 0.0, 4.0, 1, FREE, Link(200.0, 0.0))


def test_rings_share_the_links_of_a_node():
    """Two rings leave node 0 on one link: the messages of both take twice as long while both run."""
    plan = step_of([(100, (0, 2), 0), (200, (1, 3), 0)], ranks=4, ranks_per_node=2)
    alone, _ = run([plan], Conditions(uplinks=2), RINGS)
    (step,), spans = run([plan], Conditions(uplinks=1), RINGS)

    # Alone 1 s of work and 1 s of messages, and twice that. Shared: 1 + 2 s, and 2 + 4 s; at 3 s half of
    # the second ring is done, the rest takes half of 2 + 2 s.
    assert alone[0].report.measured_s == 4.0
    assert ends_s(spans) == [3.0, 3.0, 5.0, 5.0]
    assert step.time.sharing_s == pytest.approx(2 * 1 + 2 * 1)
    assert step.time.messages_s == pytest.approx(2 * 1 + 2 * 2)
    assert step.time.compute_s == pytest.approx(2 * 1 + 2 * 2)


def test_a_slow_rank_is_slow_on_shared_links_too():
    """Both slow down: at half speed on half a link, 6 and 12 s."""
    plan = step_of([(100, (0, 2), 0), (200, (1, 3), 0)], ranks=4, ranks_per_node=2)
    _, spans = run([plan], Conditions(uplinks=1, speeds={2: 0.5, 3: 0.5}), RINGS)

    assert ends_s(spans) == [6.0, 6.0, 10.0, 10.0]


def test_rings_inside_a_node_share_nothing():
    """Only what leaves a node uses its links."""
    plan = step_of([(100, (0, 1), 0), (100, (2, 3), 0), (100, (3, 4), 1)], ranks=8, ranks_per_node=4)
    (step,), _ = run([plan], Conditions(uplinks=1), RINGS)

    assert step.report.measured_s == 1.0 + 2.0
    assert step.time.sharing_s == 0.0


def test_ranks_share_cores():
    """Two ranks on one core go at half speed until the shorter one has ended; other nodes do not matter."""
    plan = step_of([(1, (0,), 0), (3, (1,), 0), (3, (2,), 0)], ranks=4, ranks_per_node=2)
    (step,), spans = run([plan], Conditions(cores=1))

    assert ends_s(spans) == [2.0, 4.0, 3.0]
    assert step.time.sharing_s == pytest.approx(1 + 1)


def test_reduction_on_two_levels():
    """Inside nodes of 4, then across 3 nodes, there and back, with the latencies of both."""
    shape = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    cost = CostModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1, Link(100.0, 0.5), Link(10.0, 3.0))
    total = 4 * shape.parameters
    inside, across = total * 3 / 4 / 100 + 2 * 0.5, total / 4 * 2 / 3 / 10 + 2 * 3.0

    assert reduction_s(shape, Cluster(12, 1, 4), cost) == pytest.approx(2 * (inside + across))
    assert reduction_s(shape, Cluster(1, 1, 4), cost) == 0.0
    across = total / 4 * 2 / 3 / 5 + 2 * 3.0
    assert reduction_s(shape, Cluster(12, 1, 4), cost, uplinks=2) == pytest.approx(2 * (inside + across))


def test_what_shardings_exchange():
    """By hand, 4 ranks of one node: weights of 2 bytes, gradients of 4, layer by layer in waves."""
    shape = ModelShape("tiny", 3, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    cost = CostModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 3, Link(100.0, 0.5), Link(100.0, 0.5))
    cluster = Cluster(4, 1, 4)
    found = {kind: collectives(shape, cluster, cost, kind, element_bytes=2) for kind in SHARDINGS}

    def one_way_s(element_bytes, times):
        return element_bytes * shape.parameters * 3 / 4 / 100 + times * 2 * 0.5

    once_s = reduction_s(shape, cluster, cost)
    assert once_s == pytest.approx(2 * one_way_s(4, 1))
    assert found["ddp"] == found["zero1"] == Collectives(0.0, once_s)
    assert found["zero2"] == Collectives(pytest.approx(one_way_s(4, 3)), pytest.approx(one_way_s(2, 1)))
    assert found["zero3"] == Collectives(pytest.approx(2 * one_way_s(2, 3) + one_way_s(4, 3)), 0.0)
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match=f"uplinks is {wrong}"):
            reduction_s(shape, cluster, cost, uplinks=wrong)


def test_collectives_of_waves():
    """Waves of 4, 3 and 5 s exchange for 3.5 s: after their tasks, or beside them as far as they last."""
    plan = step_of(TWO_WAVES, ranks=3, mode="lockstep")
    (after,), spans = run([plan], Conditions(wave_s=3.5, reduce_s=1.0))
    (beside,), hidden = run([plan], Conditions(wave_s=3.5, reduce_overlap=True))

    assert ends_s(spans) == [4.0, 2.0, 9.5, 10.5, 10.5, 19.0]
    assert [(s.start_s, s.end_s) for s in spans if s.name == "gather" and s.rank == 0] == [
        (4.0, 7.5),
        (10.5, 14.0),
        (19.0, 22.5),
    ]
    assert after.report.step_s == 12.0 + 3 * 3.5 + 1.0
    assert (after.report.measured_s, after.report.gather_s) == (12.0, 3 * 3.5)
    assert after.time.total_s == pytest.approx(3 * after.report.step_s)
    assert ends_s(hidden) == [4.0, 2.0, 6.0, 7.0, 7.0, 12.5]  # the second wave alone is too short
    assert (beside.report.step_s, beside.report.measured_s, beside.report.gather_s) == (12.5, 12.0, 0.5)
    assert beside.report.idle_share == pytest.approx(after.report.idle_share)
    with pytest.raises(ConfigError, match=r"wave_s is 3\.5, and plans are free-running"):
        run([step_of(TWO_WAVES, ranks=3)], Conditions(wave_s=3.5))


def test_reduction_behind_the_last_backward():
    """Two thirds of 6 s are backward; 4 layers of 0.5 s hide but for the last one."""
    plan = step_of([(6, (0,), 0), (1, (1,), 0)], ranks=3)
    cost = CostModel(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 4, FREE, FREE)
    (after,), _ = run([plan], Conditions(reduce_s=2.0), cost)
    (during,), spans = run([plan], Conditions(reduce_s=2.0, reduce_overlap=True), cost)

    (long,), _ = run([plan], Conditions(reduce_s=40.0, reduce_overlap=True), cost)

    assert (after.report.step_s, during.report.step_s) == (8.0, 6.5)
    assert long.report.step_s == 3.0 + 40.0  # the backward begins at 2 s, and leaves its first layer at 3 s
    assert during.report.measured_s == 6.0
    assert [(s.rank, s.start_s, s.end_s) for s in spans if s.name == "reduce"] == [
        (0, 6.0, 6.5),
        (1, 1.0, 6.5),
        (2, 0.0, 6.5),
    ]


def test_planning_and_reading_hide_behind_the_step_before():
    """The first step waits for its own; later ones for what is longer than a step; the last for no plan."""
    plans = [step_of([(4, (0,), 0)], ranks=1) for _ in range(4)]
    hidden, _ = run(plans, Conditions(plan_s=3.0, data_s=4.0))
    planning, spans = run(plans, Conditions(plan_s=6.0, data_s=1.0))
    reading, _ = run(plans, Conditions(plan_s=1.0, data_s=9.0, optimizer_s=2.0))

    assert [step.report.exposed_s for step in hidden] == [3.0 + 4.0, 0, 0, 0]
    assert [step.report.exposed_s for step in planning] == [12.0, 6.0 - 4, 6.0 - 4, 0]
    assert ends_s(spans, "plan") == [12.0, 18.0, 24.0]
    assert [step.report.exposed_s for step in reading] == [10.0, 3.0, 3.0, 3.0]
    assert [step.report.step_s for step in reading] == [16.0, 9.0, 9.0, 9.0]
    assert planning[1].time.wait_s == 2.0
    assert [step.report.plan_s for step in planning] == [6.0] * 4


@pytest.mark.parametrize(
    ("at_s", "steps", "cut"),
    [
        (1.0, 0, [("data", 0.0, 1.0)]),
        (7.0, 1, [("task", 6.0, 7.0)]),
        (10.5, 1, [("task", 6.0, 10.0), ("reduce", 10.0, 10.5)]),
        (11.25, 1, [("task", 6.0, 10.0), ("reduce", 10.0, 11.0), ("optimizer", 11.0, 11.25)]),
    ],
)
def test_a_failed_rank_ends_the_run(at_s, steps, cut):
    """Wherever it falls, the run ends then and there, and the error names rank, time and step."""
    plans = [step_of([(4, (0,), 0)], ranks=2)] * 3
    data_s = 2.0 if at_s == 1.0 else 0.5
    conditions = Conditions(failure=Failure(1, at_s), reduce_s=1.0, optimizer_s=0.5, data_s=data_s)
    spans = []
    run_of_steps = simulate(plans, PLAIN, conditions, spans.append)
    done = [next(run_of_steps) for _ in range(steps)]
    with pytest.raises(RankFailedError, match=f"rank 1 failed {at_s:g} s into .* in step {steps}"):
        next(run_of_steps)

    assert [step.report.step for step in done] == list(range(steps))
    own = [(s.name, s.start_s, s.end_s) for s in spans if s.step == steps and s.rank == 0]
    assert own == cut


def test_a_failure_after_the_end_never_comes():
    """The run is over by then."""
    steps, _ = run([step_of([(4, (0,), 0)], ranks=1)], Conditions(failure=Failure(0, 4.0)))

    assert len(steps) == 1


@pytest.mark.parametrize(
    ("conditions", "cause"),
    [
        ({"jitter": -0.1}, "jitter is -0.1"),
        ({"jitter": float("nan")}, "jitter is nan"),
        ({"plan_s": float("inf")}, "plan_s is inf"),
        ({"uplinks": 0}, "uplinks is 0"),
        ({"cores": 0}, "cores is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"speeds": {0: 0.0}}, "the speed of rank 0 is 0.0"),
        ({"speeds": {7: 1.0}}, "there is no rank 7 among 1"),
        ({"failure": Failure(-1, 1.0)}, "there is no rank -1 among 1"),
        ({"failure": Failure(0, -1.0)}, "rank 0 fails at -1.0 s"),
    ],
)
def test_conditions_that_cannot_be(conditions, cause):
    """Each is named, with what would do."""
    with pytest.raises(ConfigError, match=cause):
        run([step_of([(4, (0,), 0)], ranks=1)], Conditions(**conditions))


def test_a_run_folder_reads_like_that_of_a_real_run(tmp_path, monkeypatch):
    """run.json, metrics.jsonl, one trace a rank and the timeline, by the readers of measured runs."""
    monkeypatch.setattr("flexcp.simulate.folder._BUFFERED_SPANS", 3)
    cluster = Cluster(4, 64, 2)
    plans = [make_plan(samples_from_lengths([200, 60, n, n, 7]), cluster, PLAIN) for n in (30, 40)]
    info = RunInfo("simulated", "tiny", "none", "flexcp", "free-running", cluster, 32, {})
    conditions = Conditions(reduce_s=1.0, optimizer_s=0.5, data_s=1.0)
    with SimulatedFolder(tmp_path / "run", info) as folder:
        steps = []
        for step in simulate(plans, PLAIN, conditions, folder.record):
            folder.step(step.report)
            steps.append(step.report)

    assert read_info(tmp_path / "run") == info
    assert list(read_reports(tmp_path / "run")) == steps
    assert steps[0].loss is None
    for rank in range(4):
        spans = list(read_spans(trace_path(tmp_path / "run", 0, rank)))
        tasks = [plan.tasks[index] for plan in plans for index in plan.tasks_of(rank)]
        shown = [span.detail for span in spans if span.name == "task"]
        assert [span.rank for span in spans] == [rank] * len(spans)
        assert [detail["predicted_s"] for detail in shown] == [task.duration_s for task in tasks]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        assert spans[-1].end_s == pytest.approx(sum(report.step_s for report in steps))
    timeline = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    assert {event["tid"] for event in timeline} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="is not an empty folder"):
        SimulatedFolder(tmp_path / "run", info)
