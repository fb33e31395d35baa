"""Builds the model of a run: random weights from a shape or a transformers config, or those of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen3Config,
)

from flexcp.core.errors import ConfigError
from flexcp.integrations.transformers.config import check_supported, text_config
from flexcp.integrations.transformers.hooks import checkpoint_layers
from flexcp.runtime.collectives import is_out_of_memory
from flexcp.train.config import ModelSection, RunSection

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_LINE_CHARS = 300
_CONFIGS: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def model_config(section: ModelSection, vocab: int, max_tokens: int) -> Any:
    """The transformers config; `vocab` and `max_tokens` come from the data and the cluster."""
    source = section.pretrained or section.config
    if source is not None:
        try:
            config = AutoConfig.from_pretrained(str(source), local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a config that is not one
            name = "model.config" if section.pretrained is None else "model.pretrained"
            raise ConfigError(
                f"{name} {source}: {_in_a_line(error)}",
                "Give a folder with a config.json.",
            ) from error
        check_supported(config)
        rows = text_config(config).vocab_size
        if rows < vocab:
            raise ConfigError(
                f"the tokenizer has {vocab} tokens, the model's vocabulary only {rows}",
                "Use the tokenizer that belongs to the model.",
            )
        return config
    try:
        return _CONFIGS[section.architecture](
            vocab_size=vocab,
            hidden_size=section.hidden,
            num_hidden_layers=section.layers,
            num_attention_heads=section.heads,
            num_key_value_heads=section.kv_heads,
            head_dim=section.head_dim,
            intermediate_size=section.intermediate,
            max_position_embeddings=max_tokens,
            tie_word_embeddings=section.tied,
        )
    except Exception as error:  # as above
        raise ConfigError(
            f"[model] does not describe a model: {_in_a_line(error)}", "Mend the section [model]."
        ) from error


def build_model(
    config: Any, run: RunSection, device: torch.device, pretrained: Path | None = None
) -> nn.Module:
    """The same weights on every rank: random ones, or those of a folder.

    Weights stay in fp32 under `bf16`: the computation is low precision, the optimizer's copy is not.
    """
    torch.manual_seed(run.seed)
    loaded = None if pretrained is None else _loaded(pretrained, config)
    model: Any = loaded or _random(config)
    model.to(device=device, dtype=torch.float64 if run.dtype == "fp64" else torch.float32)
    if run.gradient_checkpointing:
        checkpoint_layers(model)
    trained: nn.Module = model.train()
    return trained


def _random(config: Any) -> Any:
    try:
        return _kind(config).from_config(config)
    except Exception as error:  # of every kind: a config is checked where its values are used
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"no model can be built as the config says: {type(error).__name__}: {_in_a_line(error)}",
            "Mend the section [model], or the config.json that it names.",
        ) from error


def _in_a_line(error: Exception) -> str:
    """What transformers says over several lines, without the traces that torch appends."""
    return " ".join(str(error).partition("\nException raised from")[0].split())[:_LINE_CHARS]


def _kind(config: Any) -> Any:
    """What builds the model: one that sees images has its text model inside."""
    return AutoModelForCausalLM if text_config(config) is config else AutoModelForImageTextToText


def _loaded(folder: Path, config: Any) -> Any:
    """Weights from safetensors alone: nothing in them can run."""
    load: Any = _kind(config).from_pretrained
    try:
        model, report = load(
            str(folder), config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises many kinds for a folder that is not one
        raise ConfigError(
            f"model.pretrained {folder}: {_in_a_line(error)}",
            "Give a folder with config.json and model.safetensors, as save_pretrained writes it.",
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"model.pretrained {folder} lacks {len(missing)} weights, {missing[0]} among them",
            "They would stay random. Take config and weights from the same model.",
        )
    return model


def compute_dtype(run: RunSection) -> torch.dtype:
    """Dtype of matrix products and activations."""
    return _DTYPES[run.dtype]
