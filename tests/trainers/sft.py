"""What trains in these tests: a tiny chat model, its tokenizer, its chats, and trainers over them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformers_sft.py"
WORLD = 2


def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("transformers_sft", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["transformers_sft"] = module
    spec.loader.exec_module(module)
    return module


def make_trainer(folder: Path, *, groups: Any = None, model: Any = None, **changes: Any) -> Any:
    """An SFTTrainer over twelve chats, on flexible groups if `groups` are given; a step may hold them all."""
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    from flexcp.integrations.transformers import flexible

    made = example()
    tokenizer = made.tiny_tokenizer()
    set_seed(3)
    model = made.tiny_model(len(tokenizer)) if model is None else model
    more = {name: changes.pop(name) for name in ("peft_config", "eval_dataset") if name in changes}
    arguments = {
        "output_dir": str(folder),
        "max_steps": 4,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0,
        "max_length": 1024,
        "assistant_only_loss": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 5,
    }
    kind: Any = SFTTrainer
    if groups is not None:
        kind, more["groups"] = flexible(SFTTrainer), groups
    return kind(
        model=model,
        args=SFTConfig(**{**arguments, **changes}),
        train_dataset=made.made_up_chats(12, seed=2),
        processing_class=tokenizer,
        **more,
    )


def losses(trainer: Any) -> list[float]:
    """As the trainer logged them, step by step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies of what is trained."""
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
