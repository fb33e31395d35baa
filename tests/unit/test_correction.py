"""Online correction: wrong calibrations are repaired, right ones stay, damage is refused."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.model_shape import model_shape
from flexcp.core.plan import EXCHANGE_KINDS
from flexcp.core.sample import samples_from_lengths
from flexcp.cost import cost_model, hardware
from flexcp.cost.correction import MOST, MOST_A_STEP, Correction, MeasuredTasks, _terms
from flexcp.cost.model import Link, Load
from flexcp.planner import make_plan
from flexcp.planner.placement import crosses_nodes

LENGTHS = json.loads((Path(__file__).parents[1] / "data/python_source_lengths_qwen.json").read_text())
TRUE = cost_model(model_shape("qwen3-8b"), hardware("h100"))
CLUSTER = Cluster(16, 16384)
NOISE = 0.05


def scaled(cost, factor):
    """All coefficients wrong by one factor."""
    links = (Link(link.bytes_per_s / factor, link.latency_s * factor) for link in (cost.intra, cost.inter))
    intra, inter = links
    seconds = {name: getattr(cost, name) * factor for name in _SECONDS}
    return replace(cost, **seconds, intra=intra, inter=inter)


_SECONDS = ("pair_s", "token_s", "sample_s", "pack_s", "ring_step_s")


def tasks_of(plan):
    loads = [
        sum((Load.of(s, plan.whole_below_tokens) for s in plan.pack(task)), Load()) for task in plan.tasks
    ]
    counts = np.array([load.counts for load in loads])
    degree = np.array([task.degree for task in plan.tasks])
    crosses = np.array([crosses_nodes(task.ranks, plan.cluster) for task in plan.tasks])
    return counts, degree, crosses, [task.exchange for task in plan.tasks]


def measured(plan, true=TRUE):
    """Tasks of a plan, and what they really take."""
    blank = MeasuredTasks(*tasks_of(plan), np.zeros(len(plan.tasks)))
    return replace(blank, seconds=blank.seconds_under(true))


def train(wrong, steps=20, true=TRUE, noise=NOISE, batch=64):
    """Plans with the corrected model, measures with the true one; errors and corrections by step."""
    draw, jitter = random.Random(0), np.random.default_rng(0)
    correction, errors, corrections = Correction(), [], []
    for _ in range(steps):
        samples = samples_from_lengths(draw.sample([n for n in LENGTHS if n <= 100_000], batch))
        plan = make_plan(samples, CLUSTER, correction.apply(wrong))
        tasks = measured(plan, true)
        real_s = tasks.seconds
        said_s = np.array([task.duration_s for task in plan.tasks])
        errors.append(float(np.mean(np.abs(said_s / real_s - 1))))
        noisy = replace(tasks, seconds=real_s * jitter.lognormal(0, noise, len(real_s)))
        correction = correction.update(wrong, noisy)
        corrections.append(correction)
    return errors, corrections


@pytest.mark.parametrize(
    "wrong",
    [
        scaled(TRUE, 3.0),
        scaled(TRUE, 0.2),
        replace(TRUE, pair_s=0.3 * TRUE.pair_s),
        replace(TRUE, token_s=2 * TRUE.token_s),
    ],
    ids=["all x3", "all x0.2", "attention x0.3", "linear x2"],
)
def test_a_wrong_calibration_is_repaired_within_20_steps(wrong):
    errors, corrections = train(wrong)
    assert errors[0] > 0.1
    assert max(errors[-3:]) < 0.03
    for before, after in pairwise(corrections):
        ratios = np.array(after.factors) / np.array(before.factors)
        assert ratios.max() <= MOST_A_STEP * (1 + 1e-9)
        assert ratios.min() >= (1 - 1e-9) / MOST_A_STEP


def test_a_right_calibration_stays_under_noise():
    errors, corrections = train(TRUE, noise=0.2)
    assert max(errors) < 0.08
    assert max(errors[-5:]) < 0.03
    assert all(0.8 < factor < 1.25 for factor in corrections[-1].factors[:2])


def test_factors_stay_within_bounds():
    _, corrections = train(scaled(TRUE, 1000.0), steps=30)
    assert min(corrections[-1].factors) == pytest.approx(1 / MOST)


def test_disturbed_tasks_and_unmeasured_ones_teach_nothing():
    tasks = measured(make_plan(samples_from_lengths(LENGTHS[:64]), Cluster(16, 16384), TRUE))
    stalled = tasks.seconds.copy()
    stalled[0], stalled[1], stalled[2] = 100 * stalled[0], np.nan, 0.0
    factors = Correction().update(TRUE, replace(tasks, seconds=stalled)).factors
    assert factors == pytest.approx((1.0,) * 4, abs=1e-6)
    nothing = np.full(len(stalled), np.nan)
    assert Correction().update(TRUE, replace(tasks, seconds=nothing)) == Correction()


@pytest.mark.parametrize(("stalled", "of"), [(1, 2), (2, 4), (4, 8), (1, 3)])
def test_a_disturbed_half_of_a_step_teaches_nothing(stalled, of):
    counts = np.array([Load.of(sample, 512).counts for sample in samples_from_lengths(LENGTHS[:of])])
    alone, inside = np.ones(of, dtype=int), np.zeros(of, dtype=bool)
    tasks = MeasuredTasks(counts, alone, inside, ["ring"] * of, np.ones(of))
    tasks = replace(tasks, seconds=tasks.seconds_under(TRUE))
    seconds = tasks.seconds.copy()
    seconds[:stalled] *= 100
    factors = Correction().update(TRUE, replace(tasks, seconds=seconds)).factors
    assert factors == pytest.approx((1.0,) * 4, abs=1e-6)


@pytest.mark.parametrize("factor", [3, 100, 1e6])
def test_a_step_that_stalls_as_a_whole_is_soon_forgotten(factor):
    tasks = measured(make_plan(samples_from_lengths(LENGTHS[:64]), Cluster(16, 16384), TRUE))
    correction = Correction()
    for step in range(12):
        stall = factor if step == 4 else 1.0
        correction = correction.update(TRUE, replace(tasks, seconds=stall * tasks.seconds))
        said_s = tasks.seconds_under(correction.apply(TRUE))
        assert np.abs(said_s / tasks.seconds - 1).max() < 0.3
    assert np.abs(said_s / tasks.seconds - 1).max() < 0.1


def test_absurd_times_leave_factors_finite():
    tasks = measured(make_plan(samples_from_lengths(LENGTHS[:64]), Cluster(16, 16384), TRUE))
    for value in (1.7e308, 1e-308):
        seconds = np.full(len(tasks.seconds), value)
        correction = Correction().update(TRUE, replace(tasks, seconds=seconds))
        assert correction.is_sound()


@pytest.mark.parametrize("exchange", EXCHANGE_KINDS)
def test_terms_add_up_to_the_corrected_time(exchange):
    correction = Correction(factors=(0.5, 2.0, 3.0, 4.0))
    tasks = measured(make_plan(samples_from_lengths(LENGTHS[:64]), Cluster(16, 8192), TRUE))
    tasks = replace(tasks, exchanges=[exchange] * len(tasks.degree))
    whole_s = tasks.seconds_under(correction.apply(TRUE))
    terms = _terms(TRUE, correction.factors, tasks)
    assert (terms >= -1e-9 * whole_s[:, None]).all()
    np.testing.assert_allclose(terms @ np.array(correction.factors), whole_s, rtol=1e-7)


def test_json_keeps_it_and_damage_is_refused():
    _, corrections = train(scaled(TRUE, 2.0), steps=2)
    kept = json.loads(json.dumps(corrections[-1].to_json()))
    assert Correction.from_json(kept) == corrections[-1]
    with pytest.raises(InputError, match="schema 'x'"):
        Correction.from_json({**kept, "schema": "x"})
    lopsided = [[0.0, 1.0, 0, 0], *[[0.0] * 4] * 3]
    for damage in (
        {"factors": [1.0]},
        {"factors": [-1.0, 1, 1, 1]},
        {"factors": [17.0, 1, 1, 1]},
        {"factors": [10**400, 1, 1, 1]},
        {"moment": [float("nan")] * 4},
        {"moment": [1e308] * 4},
        {"gram": [[1e308] * 4] * 4},
        {"gram": lopsided},
        {"factors": ["x", 1, 1, 1]},
        {"moment": None},
    ):
        with pytest.raises(InputError, match="damaged"):
            Correction.from_json({**kept, **damage})
    with pytest.raises(InputError, match="damaged"):
        Correction.from_json({name: value for name, value in kept.items() if name != "gram"})
