"""A function of the user's that raises is named, and what it raised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.datasets import ListDataset
from tests.distributed.test_engine import make_engine, make_planner
from tests.models import tiny_model

from flexcp.core.errors import DataError, RunError
from flexcp.runtime.callbacks import named
from flexcp.runtime.launch import World, joined_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Of one rank."""
    with joined_world(rendezvous=tmp_path_factory.mktemp("world") / "meet") as joined:
        yield joined


def refuse(*_values: object) -> bool:
    raise KeyError("boom")


@pytest.mark.parametrize("name", ["on_notice", "on_step_end", "stop_asked"])
def test_a_callback_that_raises_is_named(world: World, name: str) -> None:
    """With its place; the notice is that a step was skipped."""
    from flexcp.integrations.transformers import enable
    from flexcp.runtime.step import loss_sum_of

    model: Any = tiny_model()
    bad = float("nan") if name == "on_notice" else 1.0
    engine = make_engine(
        model,
        make_planner(1, tokens_per_rank=96),
        ListDataset([20, 30]),
        global_batch=2,
        steps=1,
        on_bad_loss="skip",
        **{name: refuse},
    )

    def run() -> None:
        with engine:
            for step in engine:
                for micro in step:
                    step.backward(loss_sum_of(model(**micro.inputs), micro) * bad, micro)
                step.finish()

    with enable(model), pytest.raises(RunError) as caught:
        run()

    assert caught.value.cause.startswith(f"{name} raised KeyError: 'boom' ({Path(__file__)}, line ")
    assert name in caught.value.remedy


def test_an_error_of_ours_keeps_its_kind() -> None:
    """A callback may end a run in its own words."""

    def refuse_the_data(text: str) -> None:
        raise DataError(text, "Take others.")

    assert named("on_notice", str.upper)("late") == "LATE"
    with pytest.raises(DataError, match="late"):
        named("on_notice", refuse_the_data)("late")
