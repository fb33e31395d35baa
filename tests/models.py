"""Tiny models, data and the one-process reference that every multi-rank test is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.datasets import VOCAB, ListDataset

__all__ = ["FAMILIES", "VOCAB", "ListDataset", "reference_step", "relative_error", "tiny_model"]

_MOE = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
_ALTERNATING = ["sliding_attention", "full_attention"]

# Every kind of model that the adapter takes, with the options that make its attention its own. The auxiliary
# loss is weighted far above what one would train with, so that an error in it shows.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2 window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {}),
    "mistral": (MistralConfig, {}),
    "mistral window": (MistralConfig, {"sliding_window": 7}),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": 6, "layer_types": _ALTERNATING, "attn_logit_softcapping": 0.05,
         "query_pre_attn_scalar": 8},
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {"sliding_window": 5, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": (
        GptOssConfig,
        {**_MOE, "num_local_experts": 4, "sliding_window": 8, "layer_types": _ALTERNATING,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "mixtral": (MixtralConfig, {**_MOE, "num_local_experts": 4, "sliding_window": 11}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {**_MOE, "num_experts": 6, "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
         "moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4,
         "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
         "v_head_dim": 7, "head_dim": 4,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}  # fmt: skip


def tiny_model(family: str = "qwen3", dtype: torch.dtype = torch.float32, layers: int = 2) -> Any:
    """A model of a few thousand weights, the same on every call."""
    kind, options = FAMILIES[family]
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(7)
    model: Any = AutoModelForCausalLM.from_config(kind(**{**shape, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or parameter.dim() == 1:  # else zeros or ones, whatever is done with them
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).train()


def reference_step(model: Any, dataset: Any, indices: Sequence[int]) -> float:
    """Loss and `.grad` of the samples run one by one, by plain transformers.

    The loss is the sum of the token losses over the number of supervised tokens of all samples; its gradient
    also has that of the router's auxiliary loss, if the config asks for it: the mean over samples of what
    transformers computes for each of them, weighted by tokens.
    """
    sums, count, auxiliary, tokens = [], 0, [], 0
    for index in indices:
        example = dataset[index]
        ids = torch.as_tensor(example["input_ids"])[None]
        targets = torch.as_tensor(example.get("labels", example["input_ids"]))[1:]
        output = model(input_ids=ids, use_cache=False)
        logits = output.logits[0, :-1]
        tokens += ids.numel()
        if getattr(output, "aux_loss", None) is not None:
            auxiliary.append(model.config.router_aux_loss_coef * ids.numel() * output.aux_loss)
        if len(targets) and (targets != -100).any():
            sums.append(F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    loss = torch.stack(sums).sum() / count
    (loss + torch.stack(auxiliary).sum() / tokens if auxiliary else loss).backward()
    return float(loss.detach())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
