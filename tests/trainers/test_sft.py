"""TRL's SFTTrainer on flexible groups: the same losses, weights, checkpoints and adapters as by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcp.core.errors import DataError, UnsupportedError
from tests.harness import run_ranks
from tests.models import relative_error
from tests.trainers.sft import EXAMPLE, WORLD, losses, make_trainer, weights

ROOT = EXAMPLE.parents[1]
pytestmark = [
    pytest.mark.timeout(600),  # five trainings in one world, where libraries alone take seconds to load
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # names that these libraries still use of each other
]


def on_two_ranks(world: Any, folder: Path) -> dict[str, Any]:
    """Every run of this file that takes ranks, in one world; what the tests look at."""
    warnings.simplefilter("ignore")
    # What torchrun would have said; the world itself is there already.
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world.size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    from peft import LoraConfig

    from flexcp.integrations.transformers import Groups

    groups = Groups(tokens_per_rank=700, whole_below_tokens=0)  # the longest chat has 1024
    made: dict[str, Any] = {}

    plain = make_trainer(
        folder / "rows",
        groups=groups,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        eval_dataset=_chats(),
        eval_strategy="steps",
        eval_steps=2,
    )
    plain.train()
    made["rows"] = losses(plain), weights(plain)
    made["eval"] = [entry["eval_loss"] for entry in plain.state.log_history if "eval_loss" in entry]
    made["degree"] = max(entry.get("flexcp/largest_degree", 0) for entry in plain.state.log_history)
    made["attention"] = plain.model.config._attn_implementation

    packed = make_trainer(folder / "packed", groups=groups, packing=True, **_by(1, 1))
    made["packed rows"] = len(packed.train_dataset)
    packed.train()
    made["packed"] = losses(packed), weights(packed)

    few = {"groups": groups, "save_strategy": "steps", "save_steps": 2, **_by(1, 2), "optim": "adamw_torch"}
    whole = make_trainer(folder / "whole", **few)
    whole.train()
    resumed = make_trainer(folder / "whole", **few)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    made["whole"], made["resumed"] = (losses(whole), weights(whole)), (losses(resumed), weights(resumed))

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = make_trainer(folder / "lora", groups=groups, peft_config=lora, **_by(3, 2))
    adapted.train()
    adapted.save_model(str(folder / "lora"))
    made["lora"] = losses(adapted), weights(adapted)
    return made


def _by(rows: int, parts: int) -> dict[str, int]:
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": parts}


def _chats() -> Any:
    from tests.trainers.sft import example

    return example().made_up_chats(5, seed=9)


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("sft")
    return folder, run_ranks(on_two_ranks, WORLD, folder, deadline_s=500.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plain trainer, in this process: all twelve chats in one padded batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = tmp_path_factory.mktemp("alone")
        trainer = make_trainer(
            folder,
            **_by(12, 1),
            eval_dataset=_chats(),
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=5,
        )
        trainer.train()
    history = trainer.state.log_history
    return {
        "rows": (losses(trainer), weights(trainer)),
        "eval": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
    }


@pytest.mark.parametrize("kind", ["rows", "packed"])
def test_losses_and_weights_are_those_of_the_plain_trainer(
    kind: str, by_rank: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    """D08, D11, D12: one batch of 12 against 2 parts on 2 ranks, packed and not, assistant only."""
    expected_losses, expected = alone["rows"]
    for made in by_rank[1]:
        found_losses, found = made[kind]
        assert found_losses == pytest.approx(expected_losses, rel=2e-5)
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert relative_error(weight, expected[name]) <= 1e-5, name
    assert expected_losses[-1] < expected_losses[0]


def test_groups_of_two_ranks_were_formed_and_the_model_is_restored(
    by_rank: tuple[Path, list[dict[str, Any]]],
) -> None:
    for made in by_rank[1]:
        assert made["degree"] == 2
        assert made["packed rows"] == WORLD  # so a step of one row a rank holds all chats
        assert made["attention"] == "sdpa"


def test_evaluation_is_the_mean_over_targets(
    by_rank: tuple[Path, list[dict[str, Any]]], alone: dict[str, Any]
) -> None:
    for made in by_rank[1]:
        assert made["eval"] == pytest.approx(alone["eval"], rel=2e-5)


def test_a_resumed_run_is_the_unbroken_one(by_rank: tuple[Path, list[dict[str, Any]]]) -> None:
    """D59: from step 2 of 4, with batches of its own order, to the bit."""
    for made in by_rank[1]:
        (whole_losses, whole), (resumed_losses, resumed) = made["whole"], made["resumed"]
        assert resumed_losses == whole_losses
        assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_adapters_alone_are_trained_and_saved(by_rank: tuple[Path, list[dict[str, Any]]]) -> None:
    from peft import PeftModel
    from transformers import set_seed

    from tests.trainers.sft import example

    folder, made = by_rank
    found_losses, found = made[0]["lora"]
    assert all("lora_" in name for name in found)
    assert found_losses[-1] < found_losses[0]
    module = example()
    set_seed(3)
    base = module.tiny_model(len(module.tiny_tokenizer()))
    loaded = PeftModel.from_pretrained(base, folder / "lora").state_dict()
    for name, weight in found.items():
        assert torch.equal(loaded[name], weight), name


def test_readme_shows_the_lines_that_the_example_has(tmp_path: Path) -> None:
    """The diff of the README leads from a plain script to the example, which runs under torchrun."""
    text = (ROOT / "README.md").read_text()
    match = re.search(r"```diff\n(.*?)```", text, re.DOTALL)
    assert match is not None
    lines = match[1].splitlines()
    changed = [line for line in lines if line[:1] in "+-"]
    assert len(changed) <= 5
    script = EXAMPLE.read_text().replace("  # flexcp\n", "\n")
    after = [line[1:].strip() for line in lines if line[:1] in "+ " and line.strip()]
    assert all(line in script for line in after), after

    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--output", str(tmp_path), "--steps", "4"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert f"saved to {tmp_path}" in ran.stdout
    assert "'flexcp/largest_degree': 2" in ran.stdout
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "checkpoint-3").is_dir()


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"label_smoothing_factor": 0.1}, r"args\.label_smoothing_factor is 0\.1"),
        ({"neftune_noise_alpha": 5.0}, r"args\.neftune_noise_alpha is 5\.0"),
        ({"loss_type": "dft"}, r"args\.loss_type is 'dft'|compute_loss_func is given"),
        ({"include_num_input_tokens_seen": "all"}, r"args\.include_num_input_tokens_seen is 'all'"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_arguments_that_groups_do_not_have_are_refused(
    changes: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    """By name, when the trainer is made."""
    from flexcp.integrations.transformers import Groups

    with pytest.raises(UnsupportedError, match=cause):
        make_trainer(tmp_path, groups=Groups(), **changes)


@pytest.mark.filterwarnings("ignore")
def test_trainers_with_a_loss_of_their_own_are_refused() -> None:
    from transformers import Trainer
    from trl import DPOTrainer, SFTTrainer

    from flexcp.integrations.transformers import flexible

    class Own(Trainer):
        def compute_loss(self, *_: Any, **__: Any) -> Any:
            return None

    with pytest.raises(
        UnsupportedError, match="Own has a compute_loss of its own, which groups would pass by"
    ):
        flexible(Own)
    with pytest.raises(UnsupportedError, match="DPOTrainer has a compute_loss of its own"):
        flexible(DPOTrainer)
    assert issubclass(flexible(SFTTrainer), SFTTrainer)
    assert issubclass(flexible(Trainer), Trainer)


@pytest.mark.filterwarnings("ignore")
def test_predictions_and_missing_data_are_refused(tmp_path: Path) -> None:
    from flexcp.core.errors import ConfigError
    from flexcp.integrations.transformers import Groups

    trainer = make_trainer(tmp_path, groups=Groups())
    with pytest.raises(UnsupportedError, match="predictions were asked for"):
        trainer.predict(None)
    with pytest.raises(ConfigError, match="there is no eval_dataset"):
        trainer.evaluate()
    trainer.train_dataset = (row for row in ())
    with pytest.raises(DataError, match="a generator has no length"):
        trainer.get_train_dataloader()
