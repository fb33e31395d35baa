"""What an engine compares across ranks: every argument that changes a plan, a step or a weight."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.datasets import ListDataset

from flexcp.core.cluster import Cluster
from flexcp.core.model_shape import ModelShape
from flexcp.cost.model import cost_model
from flexcp.cost.presets import hardware
from flexcp.planner import Planner
from flexcp.runtime import agreement
from flexcp.runtime.settings import settings_of
from flexcp.runtime.sharding import Replicated

SHAPE = ModelShape("tiny", 2, 32, 4, 2, 8, 48, 97)
PLANNER = Planner(Cluster(2, 48), cost_model(SHAPE, hardware("cpu")))


def model_of(*shape: int, value: float = 0.5) -> Any:
    """One parameter."""
    return torch.nn.ParameterList([torch.full(shape, value)])


def engine(**changes: Any) -> Any:
    """As much of an engine as is compared; every call makes everything anew, as every rank does."""
    model = model_of(2, 3)
    own: dict[str, Any] = {
        "planner": replace(PLANNER),
        "dataset": ListDataset([5, 9, 7]),
        "global_batch": 4,
        "steps": 9,
        "seed": 0,
        "clip_norm": 1.0,
        "on_bad_loss": "stop",
        "learn_costs": False,
        "model": model,
        **changes,
    }
    return SimpleNamespace(**own, sharding=Replicated(own["model"]))


@pytest.mark.parametrize(
    ("argument", "value", "names"),
    [
        ("planner", replace(PLANNER, cluster=Cluster(2, 49)), {"planner"}),
        ("planner", replace(PLANNER, policy="static"), {"planner"}),
        ("planner", replace(PLANNER, cost=replace(PLANNER.cost, token_s=1e-9)), {"planner"}),
        ("dataset", ListDataset([5, 7, 9]), {"lengths of the data set"}),
        ("global_batch", 5, {"global_batch"}),
        ("steps", None, {"number of steps"}),
        ("seed", 1, {"seed"}),
        ("clip_norm", None, {"clip_norm"}),
        ("on_bad_loss", "skip", {"on_bad_loss"}),
        ("learn_costs", True, {"learn_costs"}),
        ("model", model_of(2, 3, value=0.25), {"weights of the model"}),
        ("model", model_of(3, 2), {"parameter shapes"}),
    ],
)
def test_another_argument_is_another_setting(argument: str, value: Any, names: set[str]) -> None:
    """It alone, under its name; what is equal is equal as text."""
    one, other, same = (settings_of(made) for made in (engine(), engine(**{argument: value}), engine()))

    assert one == same
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == names


@pytest.mark.parametrize("package", ["torch", "numpy", "transformers", "tokenizers"])
def test_another_version_of_what_computes_is_another_setting(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    before = settings_of(engine())
    version = agreement.version
    monkeypatch.setattr(agreement, "version", lambda name: "0.0" if name == package else version(name))

    changed = {name for name, value in settings_of(engine()).items() if value != before[name]}
    assert changed == {f"version of {package}"}
