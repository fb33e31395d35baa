"""FlexCP under Megatron's schedules, optimizers and grids: every gradient is that of one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.megatron.jobs import Case, train_cases, train_twenty

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "aux_loss",
}
BALANCED = {**EXPERTS, "moe_aux_loss_coeff": 0.1}
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 2000}

# On four processes.
SHORT = {
    "data-parallel": Case(),
    "tensor-sequence-parallel": Case(tensor=2),
    "pipeline": Case(pipeline=2),
    "distributed-optimizer": Case(wrapping=SHARDED),
    "overlapped-reduction": Case(wrapping=OVERLAPPED),
    "full-recompute": Case(options=FULL),
    "selective-recompute": Case(options=SELECTIVE),
    "no-task-for-most-ranks": Case(wrapping=OVERLAPPED, global_batch=1, steps=2),
    "balanced-experts": Case(options=BALANCED),
    "expert-parallel": Case(expert=2, options=BALANCED),
}
LONG = {
    "tensor-pipeline": Case(tensor=2, pipeline=2, options=FULL, wrapping=SHARDED),
    "tensor-pipeline-overlapped": Case(
        tensor=2, pipeline=2, options=SELECTIVE, wrapping={**SHARDED, **OVERLAPPED}
    ),
    "four-stages": Case(pipeline=4),
    "experts-without-balance": Case(options=EXPERTS),
    "expert-parallel-recomputed": Case(expert=4, options={**BALANCED, **FULL}),
    "tensor-expert-parallel": Case(tensor=2, expert=2, options=BALANCED),
    "pipeline-expert-parallel": Case(pipeline=2, expert=2, options=BALANCED),
}
ODD = {"odd-data-parallel": Case(), "odd-balanced-experts": Case(options=BALANCED)}
SIX = {
    "odd-pipeline": Case(pipeline=2),
    "odd-tensor": Case(tensor=2),
    "odd-experts": Case(expert=2, options=EXPERTS),
}

Found = list[Mapping[str, Any]]


@pytest.fixture(scope="module")
def short() -> Found:
    return run_ranks(train_cases, 4, SHORT)


@pytest.fixture(scope="module")
def long() -> Found:
    return run_ranks(train_cases, 4, LONG, deadline_s=280)


@pytest.fixture(scope="module")
def odd() -> Found:
    return run_ranks(train_cases, 3, ODD)


@pytest.fixture(scope="module")
def six() -> Found:
    return run_ranks(train_cases, 6, SIX, deadline_s=280)


def assert_as_one_process(found: Found, name: str) -> list[dict[str, Any]]:
    """Losses and gradients of every step are those of one process; what each process found."""
    own: list[dict[str, Any]] = [of_process[name] for of_process in found]
    for one in own:
        assert not isinstance(one, str), one
        assert len(set(one["expected"])) == len(one["expected"])
        assert one["losses"] == pytest.approx(one["expected"], rel=1e-5)
        assert max(one["errors"])[0] < 1e-5, one["errors"]
    return own


@pytest.mark.parametrize("name", SHORT)
def test_every_gradient_is_that_of_one_process(short: Found, name: str) -> None:
    """Plans of mixed degrees, odd ones among them, whatever happens to gradients and activations."""
    found, case = assert_as_one_process(short, name), SHORT[name]

    counts = [tuple(one["counts"][step] for one in found) for step in range(case.steps)]
    if case.pipeline > 1 or case.expert > 1:
        # Batches without a sample where a rank has no task in a wave.
        assert all(one["counts"] == one["waves"] for one in found)
    elif name == "no-task-for-most-ranks":
        # Overlapped reduction waits for the hooks of every rank, so each has a backward pass.
        assert counts == [(1, 1, 1, 1)] * 2
    elif case.tensor == 1:
        assert {degree for step in found[0]["degrees"] for degree in step} == {1, 2, 3, 4}
        assert any(len(set(of_step)) > 1 for of_step in counts), counts


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_combinations(long: Found, name: str) -> None:
    """Everything at once."""
    assert_as_one_process(long, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_three_ranks(odd: Found, name: str) -> None:
    """A number of ranks that Megatron's own dynamic layout does not take."""
    assert_as_one_process(odd, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIX)
def test_three_cells_of_two(six: Found, name: str) -> None:
    """Degree 3 under 1F1B and under tensor parallelism; expert groups inside six ranks."""
    assert_as_one_process(six, name)


def test_twenty_steps_lose_as_megatrons_static_layouts_do() -> None:
    """The flexcp policy, Megatron's data-parallel layout, and its context-parallel layout (`static_cp`)."""
    found = run_ranks(train_twenty, 4)[0]

    degrees = {degree for of_step in found["degrees"] for degree in of_step}
    assert len(degrees) > 2, degrees
    assert len(found["flexcp"]) == 20
    assert found["flexcp"] == pytest.approx(found["data"], rel=1e-5)
    assert found["flexcp"] == pytest.approx(found["context"], rel=1e-5)
    assert found["flexcp"][-1] < found["flexcp"][0]
