"""Reads what FlexCP needs from a transformers config, and refuses configs it would compute wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexcp.core.errors import UnsupportedError
from flexcp.core.model_shape import ModelShape, feed_forward
from flexcp.integrations.transformers.encoders import vision_shape

# Held to one process by the tests. Others may mix tokens outside of attention (convolutions, state spaces,
# chunked layers), and then train on wrong gradients with a loss that hardly shows it.
SUPPORTED_MODELS = (
    "deepseek_v3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt_oss",
    "internvl",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_text",
)

# Layers that attend to all or to a window of the rows before them.
_LAYER_TYPES = {"full_attention", "sliding_attention"}

# These scale the rotary table by the longest position *seen*, which differs between the ranks of a group.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def text_config(config: Any) -> Any:
    """The config of the language model: of a composite model its part, else the config itself."""
    return config.get_text_config(decoder=True)


def shape_of(config: Any) -> ModelShape:
    """The shape of a model; of a mixture of experts what one token meets.

    Its vision encoder comes along. Experts that a token does not meet, and what latent attention saves, are
    in `extra_parameters`. Windows are not in a shape: the planner prices windowed layers as if they saw all.
    """
    whole, config = config, text_config(config)
    heads = config.num_attention_heads
    active, idle = _feed_forward(config)
    encoder, front = vision_shape(whole)
    return ModelShape(
        name=whole.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=_head_dim(config),
        intermediate=active,
        vocab=config.vocab_size,
        tied=bool(whole.tie_word_embeddings),
        extra_parameters=idle + front,
        encoder=encoder,
    )


def _head_dim(config: Any) -> int:
    """Width in which queries meet keys."""
    nope = getattr(config, "qk_nope_head_dim", None)
    if nope is not None:
        return int(nope) + int(config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _feed_forward(config: Any) -> tuple[int, int]:
    """Feed-forward width that a token meets, mean of the layers; weights of experts that it does not."""
    dense = int(config.intermediate_size)
    experts = num_experts(config)
    if not experts:
        return dense, 0
    width = int(getattr(config, "moe_intermediate_size", None) or dense)
    chosen = int(config.num_experts_per_tok)
    shared = int(getattr(config, "n_shared_experts", None) or 0)
    layers, first = int(config.num_hidden_layers), int(getattr(config, "first_k_dense_replace", None) or 0)
    first = min(first, layers)
    return feed_forward(
        int(config.hidden_size),
        layers,
        dense,
        experts=experts,
        chosen=chosen,
        expert_width=width,
        shared_width=shared * width,
        dense_layers=first,
    )


def num_experts(config: Any) -> int:
    """Routed experts of a layer; 0 of a dense model."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        count = getattr(config, name, None)
        if count:
            return int(count)
    return 0


def check_supported(config: Any) -> None:
    """Refuse by name, before step 0, what would be wrong under a changing degree.

    Raises:
        UnsupportedError: another kind of model, layers that neither attend to all rows before them nor to a
            window of them, length-dependent rotary scaling, or attention dropout.
    """
    _require_known(config)
    config = text_config(config)
    _require_known(config)
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise UnsupportedError(
            f"some layers are of another kind than FlexCP computes ({', '.join(sorted(other))})",
            f"Layers may be {' or '.join(sorted(_LAYER_TYPES))}.",
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedError(
            "use_bidirectional_attention makes text attend both ways", "Train such encoders without FlexCP."
        )
    for kind in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedError(
                f"rope_type {kind!r} depends on the longest position a rank sees, "
                "which differs inside a group",
                "Use a fixed rope_type (default, linear, yarn, llama3).",
            )
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedError(
            f"attention_dropout is {config.attention_dropout}", "Set attention_dropout to 0."
        )


def _require_known(config: Any) -> None:
    if config.model_type not in SUPPORTED_MODELS:
        raise UnsupportedError(
            f"models of type {config.model_type!r} have not been shown to train correctly",
            f"Supported: {', '.join(SUPPORTED_MODELS)}.",
        )


def _rope_types(parameters: dict[str, Any]) -> Iterator[str]:
    """Of all layers, or of each kind of layer where they differ."""
    nested = [value for value in parameters.values() if isinstance(value, dict) and "rope_type" in value]
    for one in nested or [parameters]:
        yield one.get("rope_type", "default")
