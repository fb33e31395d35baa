"""Arguments of transformers' trainer that groups refuse, and what a trainer leaves and resumes from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from flexcp.core.errors import ConfigError, UnsupportedError
from flexcp.integrations.transformers import Groups, flexible
from flexcp.integrations.transformers.trainer import _REFUSED_ARGUMENTS
from tests.models import tiny_model

# Not of the installed `TrainingArguments`: of other releases, or of TRL's SFTConfig.
ELSEWHERE = {"group_by_length", "include_num_input_tokens_seen", "neftune_noise_alpha"}
OF_TRL = {"loss_type", "activation_offloading"}
pytestmark = pytest.mark.filterwarnings("ignore")


def collate(rows: list[Any]) -> dict[str, Any]:
    return {"input_ids": rows[0]["input_ids"], "labels": rows[0]["input_ids"]}


def make_trainer(folder: Path, **changes: Any) -> Any:
    given = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "seed": 5, **changes}
    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **given)
    rows = [{"input_ids": [1, 2, 3, i]} for i in range(8)]
    groups = Groups(tokens_per_rank=64)
    return flexible(Trainer)(tiny_model(), args, collate, train_dataset=rows, groups=groups)


def test_refused_arguments_are_there_to_be_refused() -> None:
    """A renamed field would be let through in silence."""
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(_REFUSED_ARGUMENTS) - fields <= ELSEWHERE | OF_TRL


@pytest.mark.parametrize(
    "changes",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"train_sampling_strategy": "sequential"},
        {"dataloader_drop_last": True},
    ],
)
def test_another_order_of_samples_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (name,) = changes
    with pytest.raises(UnsupportedError, match=rf"args\.{name} is "):
        make_trainer(tmp_path, **changes)


def test_a_resumed_trainer_must_draw_the_same_samples(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    state = json.loads((tmp_path / "checkpoint-1" / "flexcp.json").read_text())
    assert (state["step"], state["seed"], state["global_batch"]) == (1, 5, 2)
    for changes, cause in (
        ({"seed": 6}, "the checkpoint was made with seed = 5, this run has 6"),
        ({"per_device_train_batch_size": 4}, "made with global_batch = 2, this run has 4"),
    ):
        again = make_trainer(tmp_path / "other", **changes)
        with pytest.raises(ConfigError, match=cause):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    resumed = make_trainer(tmp_path, max_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert json.loads((tmp_path / "checkpoint-3" / "flexcp.json").read_text())["step"] == 3


def test_what_a_node_and_a_rank_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a node are those of the launcher; under FSDP2 states are shared; buffers are sent again."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from flexcp.integrations.transformers.trainer import _sharding

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    trainer = make_trainer(tmp_path)
    seen: list[Any] = []
    made = type(trainer)._make_engine

    def watched(self: Any, model: Any, *rest: Any) -> Any:
        model.broadcast_buffers = True  # as if it were inside DDP
        engine = made(self, model, *rest)
        seen.append((engine.planner.cluster.ranks_per_node, model.broadcast_buffers))
        return engine

    monkeypatch.setattr(type(trainer), "_make_engine", watched)
    trainer.train()
    assert seen == [(1, False)]
    assert trainer.model_wrapped.broadcast_buffers is True
    sharded = torch.nn.Linear(1, 1)
    assert _sharding(sharded) == "ddp"
    sharded.__class__ = type("Sharded", (FSDPModule, torch.nn.Linear), {"__new__": object.__new__})
    assert _sharding(sharded) == "zero1"
