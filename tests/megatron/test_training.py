"""FlexCP under Megatron's schedules, optimizers and grids: every gradient is that of one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.megatron.jobs import train_alone, train_flexibly, train_twenty

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )

STEPS = 3

Reference = tuple[Any, list[float], list[Any]]


@pytest.fixture(scope="module")
def alone() -> Reference:
    """One process, sample by sample, by Megatron's own attention."""
    return run_ranks(train_alone, 1, STEPS, {})[0]


def check(
    reference: Reference,
    cells: int,
    tensor: int = 1,
    pipeline: int = 1,
    options: dict[str, Any] | None = None,
    wrapping: dict[str, Any] | None = None,
    **more: int,
) -> list[dict[str, Any]]:
    """Losses and gradients of every step are those of one process; what each process found."""
    weights, losses, gradients = reference
    assert len(set(losses)) == len(losses)
    nproc = cells * tensor * pipeline
    grid = (tensor, pipeline, options or {}, wrapping or {}, *more.values())
    found = run_ranks(train_flexibly, nproc, weights, gradients, *grid)
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert max(one["errors"])[0] < 1e-5, one["errors"]
    return found


@pytest.mark.parametrize(
    "cells", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_data_parallel(alone: Reference, cells: int) -> None:
    """Plans of mixed degrees, odd ones among them, and ranks with different numbers of micro-batches."""
    found = check(alone, cells)

    assert {degree for step in found[0]["degrees"] for degree in step} == set(range(1, cells + 1))
    counts = [tuple(one["counts"][step] for one in found) for step in range(STEPS)]
    # Two ranks have as many micro-batches each in every plan of these batches.
    assert cells == 2 or any(len(set(of_step)) > 1 for of_step in counts), counts


def test_tensor_and_sequence_parallel(alone: Reference) -> None:
    """Cells of two processes follow one plan; rows are filled up to a multiple of two."""
    check(alone, cells=2, tensor=2)


def test_pipeline(alone: Reference) -> None:
    """1F1B: equal counts everywhere, batches without a sample where a rank has no task in a wave."""
    found = check(alone, cells=2, pipeline=2)

    for one in found:
        assert one["counts"] == one["waves"]


@pytest.mark.parametrize(
    ("options", "wrapping"),
    [
        ({}, {"use_distributed_optimizer": True}),
        ({}, {"overlap_grad_reduce": True, "bucket_size": 2000}),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, {}),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, {}),
    ],
    ids=["distributed-optimizer", "overlapped-reduction", "full-recompute", "selective-recompute"],
)
def test_options_of_megatron(alone: Reference, options: dict[str, Any], wrapping: dict[str, Any]) -> None:
    """Unequal counts of micro-batches, whatever happens to gradients and activations."""
    check(alone, cells=3, options=options, wrapping=wrapping)


@pytest.mark.slow
def test_tensor_and_pipeline_parallel(alone: Reference) -> None:
    """TP x PP with sequence parallelism, full recomputation and a distributed optimizer, all at once."""
    check(
        alone,
        cells=2,
        tensor=2,
        pipeline=2,
        options={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        wrapping={"use_distributed_optimizer": True},
    )


@pytest.mark.slow
def test_pipeline_over_odd_groups(alone: Reference) -> None:
    """Degree 3 under 1F1B."""
    check(alone, cells=3, pipeline=2)


@pytest.mark.slow
def test_twenty_steps_lose_as_megatrons_static_layout_does() -> None:
    """The flexcp policy, and Megatron's own data-parallel layout with its own attention: the same losses."""
    flexible = run_ranks(train_twenty, 3, True)
    static = run_ranks(train_twenty, 3, False)

    degrees = {degree for one in flexible[0]["degrees"] for degree in one}
    assert len(degrees) > 1, degrees
    assert len(static[0]["losses"]) == 20
    assert flexible[0]["losses"] == pytest.approx(static[0]["losses"], rel=1e-5)
    assert flexible[0]["losses"][-1] < flexible[0]["losses"][0]


def test_a_rank_without_a_task_has_a_backward_pass() -> None:
    """One sample for two ranks: overlapped reduction waits for the hooks of every rank."""
    reference = run_ranks(train_alone, 1, 2, {}, 1)[0]
    found = check(reference, cells=2, wrapping={"overlap_grad_reduce": True}, global_batch=1)

    assert [one["counts"] for one in found] == [[1, 1], [1, 1]]


@pytest.mark.slow
def test_mixture_of_experts_on_one_rank_each() -> None:
    """Four experts, two a token: routing is per token, so a cut sample goes where the whole one went."""
    options = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 48}
    reference = run_ranks(train_alone, 1, STEPS, options)[0]

    check(reference, cells=3, options=options)
