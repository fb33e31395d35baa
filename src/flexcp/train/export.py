"""Writes a trained model as transformers does, so that `from_pretrained` loads it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from flexcp.core.errors import SaveError
from flexcp.integrations.transformers.hooks import inner_model
from flexcp.runtime.collectives import raise_together

# What a tokenizer is made of, as transformers names it.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
# What else a model is used with, and training leaves as it is.
_SETTINGS_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
    "chat_template.json",
)


def save_pretrained(
    model: nn.Module, folder: Path, tokenizer: Path | None, start: Path | None = None
) -> None:
    """Write weights (safetensors, in the dtype they are trained in), config and tokenizer. All ranks call it.

    Args:
        model: however it is wrapped; not enabled any more.
        folder: is made; an older model in it is replaced.
        tokenizer: folder or file of the tokenizer, copied along; None copies nothing.
        start: folder of the model that training began with, whose settings of images and of generation are
            copied along.

    Raises:
        SaveError: it could not be written, on all ranks.
    """
    # Gathered on all ranks, kept on the first.
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    trouble: SaveError | None = None
    if dist.get_rank() == 0:
        try:
            inner_model(model).save_pretrained(folder, state_dict=weights)
            _copy_tokenizer(tokenizer, folder)
            if start is not None:
                _copy(start, folder, _SETTINGS_FILES)
        except (OSError, SafetensorError) as error:
            trouble = SaveError(
                f"the model could not be written to {folder}: {error}",
                "Make room and run again with --resume: the last checkpoint is whole.",
            )
    raise_together(trouble, "saving the model")


def _copy_tokenizer(source: Path | None, folder: Path) -> None:
    if source is None:
        return
    if source.is_file():
        shutil.copy(source, folder / "tokenizer.json")
        return
    _copy(source, folder, _TOKENIZER_FILES)


def _copy(source: Path, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
