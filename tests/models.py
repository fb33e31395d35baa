"""Tiny models, data and the one-process reference that every multi-rank test is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.datasets import VOCAB, ListDataset

__all__ = ["VOCAB", "ListDataset", "reference_step", "relative_error", "tiny_model"]

_CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen2": Qwen2Config, "mistral": MistralConfig}


def tiny_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """A model of a few thousand weights, the same on every call."""
    config = _CONFIGS[family](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        sliding_window=None,
    )
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def reference_step(model: Any, dataset: Any, indices: Sequence[int]) -> float:
    """Loss and `.grad` of the samples run one by one, by plain transformers (its own sdpa attention).

    The loss is the sum of the token losses over the number of supervised tokens of all samples.
    """
    sums, count = [], 0
    for index in indices:
        example = dataset[index]
        ids = torch.as_tensor(example["input_ids"])[None]
        targets = torch.as_tensor(example.get("labels", example["input_ids"]))[1:]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        if len(targets) and (targets != -100).any():
            sums.append(F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    loss = torch.stack(sums).sum() / count
    loss.backward()
    return float(loss.detach())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
