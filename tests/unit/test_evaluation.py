"""What an evaluation leaves behind, on one rank in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed.test_engine import make_engine, make_planner
from tests.models import ListDataset, tiny_model

from flexcp.core.errors import DataError
from flexcp.integrations.transformers import enable
from flexcp.runtime.launch import joined_world


def test_an_evaluation_leaves_every_module_in_its_mode(tmp_path: Path) -> None:
    """A frozen part that stands in evaluation stays there; also where the evaluation fails."""
    model = tiny_model().train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    data, unlabelled = ListDataset([9, 30, 7], unlabelled=()), ListDataset([9, 30], unlabelled=(0, 1))
    with (
        joined_world(rendezvous=tmp_path / "meet"),
        enable(model),
        make_engine(model, make_planner(1), data, global_batch=2) as engine,
    ):
        engine.evaluate(data)
        assert [module.training for module in model.modules()] == modes
        with pytest.raises(DataError, match="has a supervised token"):
            engine.evaluate(unlabelled)
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2
