"""What holds of every simulated step: it is its plan where nothing else happens, and only gets slower."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import problems

from flexcp.planner import MODES, make_plan
from flexcp.simulate import Conditions, simulate
from flexcp.simulate.costs import StepCosts
from flexcp.simulate.tasks import run_tasks

ROUNDING = 1e-9


@st.composite
def plans(draw, policies=("flexcp", "paper", "static")):
    """A plan and the cost model that it was made with; ranks of different speeds in some."""
    batch, cluster, cost = draw(problems(max_samples=12, max_ranks=9))
    if draw(st.booleans()):
        speeds = st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=cluster.ranks, max_size=cluster.ranks)
        cluster = replace(cluster, speeds=tuple(draw(speeds)))
    policy = draw(st.sampled_from(policies))
    mode = draw(st.sampled_from(MODES))
    return make_plan(batch, cluster, cost, policy=policy, mode=mode), cost


@st.composite
def conditions(draw):
    """Anything short of a failure."""
    seconds = st.sampled_from([0.0, 0.1, 3.0])
    count = st.sampled_from([None, 1, 2])
    return Conditions(
        jitter=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 9)),
        speeds=draw(st.dictionaries(st.just(0), st.sampled_from([0.3, 0.9]))),
        uplinks=draw(count),
        cores=draw(count),
        reduce_s=draw(seconds),
        reduce_overlap=draw(st.booleans()),
        optimizer_s=draw(seconds),
        plan_s=draw(seconds),
        data_s=draw(seconds),
    )


@given(plans())
def test_without_conditions_a_step_is_its_plan(made):
    """Makespan, start and end of every task, up to the rounding of sums."""
    plan, cost = made
    (step,) = simulate([plan], cost)
    times = run_tasks(plan, StepCosts(plan, 0, cost, Conditions()).seconds)
    simulated = [step.report.measured_s, step.report.step_s, *times.start_s.tolist(), *times.end_s.tolist()]
    starts, ends = [task.start_s for task in plan.tasks], [task.end_s for task in plan.tasks]
    planned = [plan.step_s, plan.step_s, *starts, *ends]

    # Planner and simulator add samples, and divide by speeds, in different orders.
    assert simulated == pytest.approx(planned, rel=1e-12)


@given(plans(), conditions())
def test_time_adds_up_and_repeats(made, met):
    """Parts of the time are those of all ranks over the step; a second run is equal in every bit."""
    plan, cost = made
    spans, again = [], []
    steps = list(simulate([plan, plan], cost, met, spans.append))

    assert steps == list(simulate([plan, plan], cost, met, again.append))
    assert spans == again
    for step in steps:
        assert step.time.total_s == pytest.approx(plan.cluster.ranks * step.report.step_s)
        assert step.time.messages_s >= -ROUNDING
    by_rank = {}
    for span in spans:
        assert span.start_s < span.end_s
        assert by_rank.get(span.rank, 0.0) <= span.start_s * (1 + ROUNDING)
        by_rank[span.rank] = span.end_s
    assert sum(span.name == "task" for span in spans) == 2 * sum(task.degree for task in plan.tasks)


@given(plans(), st.sampled_from([{"uplinks": 1}, {"cores": 1}, {"uplinks": 2, "cores": 2}]))
def test_sharing_never_makes_a_task_end_earlier(made, shared):
    """Who runs where and in which order is fixed, so any slower task delays what follows at most."""
    plan, cost = made
    costs = StepCosts(plan, 0, cost, Conditions(**shared))
    alone = run_tasks(plan, costs.seconds)
    together = run_tasks(plan, costs.seconds, costs.sharing())

    assert np.all(together.end_s >= alone.end_s * (1 - ROUNDING))


@given(plans())
def test_enough_of_everything_changes_nothing(made):
    """As many links and cores as ranks: the shared path gives the plain one, to the last bit."""
    plan, cost = made
    enough = plan.cluster.ranks
    costs = StepCosts(plan, 0, cost, Conditions(uplinks=enough, cores=enough))
    plain, shared = run_tasks(plan, costs.seconds), run_tasks(plan, costs.seconds, costs.sharing())

    assert shared.end_s.tolist() == plain.end_s.tolist()
