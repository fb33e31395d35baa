"""Checkpoints from strangers: what is in them is read, never run."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexcp.core.errors import CheckpointError
from tests.harness import run_ranks
from tests.models import tiny_model


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def hostile_table(folder: Path, mark: Path) -> None:
    """Its table of contents is code."""
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(mark)))


def hostile_global(folder: Path, mark: Path) -> None:
    """A real table, with code in one of its fields."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Hostile(mark)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_value(folder: Path, mark: Path) -> None:
    """A learning rate that is code."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(i for i in metadata.storage_data if i.fqn == "optimizer.param_groups.0.lr")
    value = io.BytesIO()
    torch.save(Hostile(mark), value)
    (folder / "lr.distcp").write_bytes(value.getvalue())
    part = metadata.storage_data[index]
    part.relative_path, part.offset, part.length = "lr.distcp", 0, len(value.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside_file(folder: Path, mark: Path) -> None:
    """A tensor that lies somewhere else on this machine."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = f"../{mark.name}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "table": hostile_table,
    "global": hostile_global,
    "value": hostile_value,
    "outside": outside_file,
}


def save_attack_load(world: Any, folder: Path) -> dict[str, str]:
    """A good checkpoint comes back whole; every bad one is refused."""
    from flexcp.runtime.checkpoint import load_checkpoint, save_checkpoint

    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, betas=(0.5, 0.75))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    found: dict[str, str] = {}
    for step, (name, attack) in enumerate(ATTACKS.items()):
        path = save_checkpoint(folder, step, model, optimizer, {}, keep=9)
        other = tiny_model()
        again = torch.optim.AdamW(other.parameters(), lr=1.0)
        load_checkpoint(path, other, again)
        assert all(torch.equal(a, b) for a, b in zip(weights, other.parameters(), strict=True))
        assert (again.param_groups[0]["lr"], again.param_groups[0]["betas"]) == (0.25, (0.5, 0.75))
        attack(path, folder / name)
        try:
            load_checkpoint(path, other, again)
            found[name] = "nothing was raised"
        except CheckpointError as error:
            found[name] = str(error)
    return found


def test_nothing_in_a_checkpoint_runs(tmp_path: Path) -> None:
    """Code in the table of contents or in a value is refused before it runs; torch alone would run it."""
    found = run_ranks(save_attack_load, 1, tmp_path)[0]

    assert f"asks for {os.mkdir.__module__}.mkdir" in found["table"]
    assert f"asks for {os.mkdir.__module__}.mkdir" in found["global"]
    assert "Weights only load failed" in found["value"]
    assert "asks for the file '../outside'" in found["outside"]
    assert not [name for name in ATTACKS if (tmp_path / name).exists()]


def test_the_attack_is_real(tmp_path: Path) -> None:
    """What a full unpickler does with such bytes, so that the test above cannot pass by accident."""
    pickle.loads(pickle.dumps({"a": Hostile(tmp_path / "mark")}))

    assert (tmp_path / "mark").is_dir()
