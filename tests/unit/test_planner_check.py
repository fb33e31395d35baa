"""The judge finds each kind of broken plan; a good plan passes."""

from dataclasses import replace

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.model_shape import model_shape
from flexcp.core.plan import Task
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.cost import cost_model, hardware
from flexcp.planner import check, make_plan

COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
GOOD = make_plan(
    samples_from_lengths([30000, 20000, 900, 8000, 8000, 100, 30000]),
    Cluster(8, 8192),
    COST,
    policy="paper",
    mode="lockstep",
)


def with_task(number, **changes):
    tasks = list(GOOD.tasks)
    tasks[number] = replace(tasks[number], **changes)
    return replace(GOOD, tasks=tuple(tasks))


def test_the_good_plan_has_waves_and_no_violation():
    assert GOOD.num_waves > 1
    assert check(GOOD) == check(GOOD, COST) == ()


FIRST, LAST = GOOD.tasks[0], GOOD.tasks[-1]
PAIR = next((k, k + 1) for k in range(len(GOOD.tasks) - 1) if GOOD.tasks[k].wave == GOOD.tasks[k + 1].wave)
BROKEN = {
    "sample missing": (replace(GOOD, tasks=GOOD.tasks[1:]), "is in no task"),
    "sample twice": (with_task(0, samples=FIRST.samples + LAST.samples), "runs 2 times"),
    "position out of range": (with_task(0, samples=(*FIRST.samples, 7)), "position 7 of 7 samples"),
    "position negative": (with_task(0, samples=(*FIRST.samples, -1)), "position -1 of 7 samples"),
    "empty task": (
        replace(GOOD, tasks=(*GOOD.tasks, Task((), (0,), LAST.wave, 1e9, 1e9))),
        "holds no sample",
    ),
    "no ranks": (with_task(0, ranks=()), "has no ranks"),
    "rank out of range": (with_task(0, ranks=(8, *FIRST.ranks[1:])), "names rank 8 of 8"),
    "rank negative": (with_task(0, ranks=(-1, *FIRST.ranks[1:])), "names rank -1 of 8"),
    "rank twice in a group": (with_task(0, ranks=(*FIRST.ranks, FIRST.ranks[0])), "names rank 0 2 times"),
    "rank shared in a wave": (
        with_task(PAIR[0], ranks=GOOD.tasks[PAIR[1]].ranks),
        "is in 2 tasks of wave",
    ),
    "too few ranks": (with_task(0, ranks=FIRST.ranks[:1]), "on a rank that holds 8192"),
    "smaller ranks": (replace(GOOD, cluster=Cluster(8, 1000)), "on a rank that holds 1000"),
    "waves unordered": (replace(GOOD, tasks=GOOD.tasks[::-1]), "follows a later wave"),
    "ends before it starts": (with_task(0, end_s=-1.0), "runs from 0.0 s to -1.0 s"),
    "endless": (with_task(0, end_s=float("inf")), "to inf s"),
    "starts before the wave": (with_task(len(GOOD.tasks) - 1, start_s=0.0), "before earlier waves end"),
    "rank in two places at a time": (
        replace(with_task(len(GOOD.tasks) - 1, start_s=0.0), mode="free-running"),
        "while it runs task",
    ),
    "more than memory at a moment": (
        replace(
            make_plan(samples_from_lengths([8000, 7000]), Cluster(1, 8192), COST),
            tasks=(Task((0,), (0,), 0, 0.0, 2.0), Task((1,), (0,), 1, 1.0, 3.0)),
        ),
        "rank 0 holds 15000 tokens at 1.0 s",
    ),
    "another order than the list": (
        replace(with_task(len(GOOD.tasks) - 1, start_s=-0.0, end_s=0.0), mode="free-running"),
        "a later one of the list",
    ),
    "unknown mode": (replace(GOOD, mode="async"), "mode is 'async'"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_plans_are_found(kind):
    plan, message = BROKEN[kind]
    assert any(message in violation for violation in check(plan)), check(plan)


def test_predictions_are_compared_with_the_model():
    assert check(with_task(0, end_s=FIRST.end_s * 0.99)) == ()
    assert any(
        "the cost model says" in violation
        for violation in check(with_task(0, end_s=FIRST.end_s * 0.99), COST)
    )
    assert any("less than its bound" in violation for violation in check(replace(GOOD, bound_s=1e9), COST))


def test_a_sample_may_occur_twice_in_a_batch():
    """A batch that spans epochs may draw a sample again; its positions tell the two apart."""
    samples = (Sample(3, 100), Sample(3, 100), Sample(5, 40))

    assert check(make_plan(samples, Cluster(4, 64), COST)) == ()
