"""From the steps of a run to what one should do about it, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import RunInfo
from flexcp.report.advice import Figures, advice, figures_of

INFO = RunInfo("measured", "tiny", "cpu", "flexcp", "free-running", Cluster(3, 4096), 64, {})
PARTS = {
    "plan": 0.0,
    "data": 0.01,
    "gather": 0.05,
    "compute": 0.8,
    "ring wait": 0.03,
    "idle": 0.04,
    "reduce": 0.05,
    "optimizer": 0.02,
    "other": 0.0,
}
FINE = Figures(
    step_s=2.0,
    parts=PARTS,
    predicted_s=1.7,
    bound_s=1.6,
    measured_s=1.75,
    error=0.03,
    predicted_idle=0.03,
    idle=0.04,
    idle_shares=(0.05, 0.03, 0.04),
    alone=0.0,
    longest_tokens=12_345,
    tokens_per_rank=640.0,
    tokens_per_s=960.0,
    plan_s=0.1,
    mfu=0.4,
)


def step(**changes: Any) -> StepReport:
    """Two seconds: one of tasks."""
    values: dict[str, Any] = {
        "step": 0,
        "loss": 1.0,
        "grad_norm": 1.0,
        "tokens": 300,
        "supervised_tokens": 290,
        "degrees": {1: 3},
        "predicted_s": 1.0,
        "bound_s": 1.0,
        "measured_s": 1.0,
        "step_s": 2.0,
        "plan_s": 0.1,
        "exposed_s": 0.5,
        "idle_share": 0.25,
        "plan_wait_s": 0.2,
        "data_wait_s": 0.4,
        "gather_s": 0.1,
        "ring_wait_s": 0.15,
        "reduce_s": 0.2,
        "optimizer_s": 0.05,
        "idle_shares": (0.5, 0.0),
    }
    return StepReport(**{**values, **changes})


def test_the_parts_of_a_step_add_up() -> None:
    """The slowest rank waited for its plan, another one longest for data: nothing is counted twice."""
    parts = step().parts_s

    assert parts == pytest.approx(
        {
            "plan": 0.2,
            "data": 0.3,
            "gather": 0.1,
            "compute": 0.6,
            "ring wait": 0.15,
            "idle": 0.25,
            "reduce": 0.2,
            "optimizer": 0.05,
            "other": 0.15,
        }
    )
    assert sum(parts.values()) == pytest.approx(2.0)
    assert min(step(step_s=1.0, ring_wait_s=9.0).parts_s.values()) == 0.0


def test_figures_are_of_the_warm_steps() -> None:
    """The first step waits for the first plan and compiles; shares are of the time of all others."""
    reports = [
        step(step_s=50.0, exposed_s=45.0, measured_s=5.0),
        step(mfu=0.5, alone_s=0.96, longest_tokens=99, predicted_idle_share=0.1),
        step(step_s=4.0, mfu=0.2, measured_s=1.5, idle_shares=(0.1, 0.2), idle_share=0.15),
    ]
    figures = figures_of(reports)

    assert figures.step_s == 3.0
    assert figures.parts["plan"] == pytest.approx(0.4 / 6.0)
    assert sum(figures.parts.values()) == pytest.approx(1.0)
    assert figures.error == pytest.approx(0.25)
    assert figures.idle_shares == pytest.approx((0.3, 0.1))
    assert (figures.idle, figures.predicted_idle) == pytest.approx((0.2, 0.05))
    assert (figures.alone, figures.longest_tokens, figures.tokens_per_rank) == (0.5, 99, 150.0)
    assert figures.mfu == pytest.approx((0.5 * 2 + 0.2 * 4) / 6)
    assert figures_of(reports[:1]).step_s == 50.0
    assert figures_of([step(idle_shares=())]).tokens_per_rank == 0.0


def test_a_good_run_needs_no_advice() -> None:
    assert advice(FINE, INFO) == ()


IDLE = {"idle": 0.3, "parts": {**PARTS, "idle": 0.28}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"error": 0.3}, ["off by 30%", "flexcp profile --out machine.json", "run where the cores are free"]),
        (
            {**IDLE, "alone": 0.8, "predicted_idle": 0.3},
            ["30% of the time", "one sample takes as long as the step in 80%", "12,345", "run.global_batch"],
        ),
        (
            {**IDLE, "predicted_idle": 0.2},
            ["the plans know it (20%)", "Raise run.global_batch, or use fewer ranks"],
        ),
        ({**IDLE, "idle_shares": (0.4, 0.02, 0.48)}, ["rank 1 for 2%", "Is it slower"]),
        ({**IDLE, "idle_shares": (0.4, 0.22, 0.28)}, ["foresaw 3%", "timeline"]),
        (
            {"parts": {**PARTS, "gather": 0.1, "reduce": 0.2}},
            ["take 32% of the time for 640 tokens a rank", "Raise run.global_batch"],
        ),
        ({"parts": {**PARTS, "ring wait": 0.2}}, ["for 20% of the time", "4,096 tokens"]),
        ({"parts": {**PARTS, "plan": 0.05}}, ["their plan for 5% of the time", "core for planning"]),
        ({"parts": {**PARTS, "data": 0.05}}, ["their data for 5% of the time", "faster disk"]),
    ],
)
def test_each_loss_has_its_sentence(changes: dict[str, Any], words: list[str]) -> None:
    """One loss, one sentence, with its figure and what to do."""
    found = advice(replace(FINE, **changes), INFO)

    assert len(found) == 1, found
    for word in words:
        assert word in found[0]


def test_the_largest_loss_comes_first() -> None:
    """Behind predictions, since plans, and so all else, follow from them."""
    parts = {**PARTS, "plan": 0.05, "ring wait": 0.2, "data": 0.12}
    found = advice(replace(FINE, error=0.2, parts=parts), INFO)

    assert ["off by" in found[0], "messages" in found[1], "data" in found[2], "plan" in found[3]] == [
        True
    ] * 4


def test_what_is_said_of_predictions_depends_on_where_they_are_from() -> None:
    """A profiled machine is profiled again; a simulated one is off on purpose."""
    off = replace(FINE, error=0.3)

    assert "profile again" in advice(off, replace(INFO, hardware="machine.json"))[0]
    assert advice(off, replace(INFO, origin="simulated")) == ()
