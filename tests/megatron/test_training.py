"""FlexCP under Megatron's schedules, optimizers and grids: every gradient is that of one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.megatron.jobs import train_alone, train_flexibly

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
) -> list[dict[str, Any]]:
    """Losses and gradients of every step are those of one process; what each process found."""
    weights, losses, gradients = reference
    nproc = cells * tensor * pipeline
    found = run_ranks(
        train_flexibly, nproc, weights, gradients, tensor, pipeline, options or {}, wrapping or {}
    )
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert max(one["errors"])[0] < 1e-5, one["errors"]
    assert losses[-1] < losses[0]
    return found


@pytest.mark.parametrize("cells", [2, 3, 4])
def test_data_parallel(alone: Reference, cells: int) -> None:
    """Plans of mixed degrees, odd ones among them, and ranks with different numbers of micro-batches."""
    found = check(alone, cells)

    assert {degree for step in found[0]["degrees"] for degree in step} == set(range(1, cells + 1))
    counts = [tuple(one["counts"][step] for one in found) for step in range(STEPS)]
    assert any(len(set(of_step)) > 1 for of_step in counts), counts


def test_tensor_and_sequence_parallel(alone: Reference) -> None:
    """Cells of two processes follow one plan; rows are filled up to a multiple of two."""
    check(alone, cells=2, tensor=2)


def test_pipeline(alone: Reference) -> None:
    """1F1B: equal counts everywhere, batches without a sample where a rank has no task in a wave."""
    found = check(alone, cells=2, pipeline=2)

    assert len({tuple(one["counts"]) for one in found}) == 1
