"""Reads what FlexCP needs from a transformers config, and refuses configs it would compute wrongly."""

from __future__ import annotations

from typing import Any

from flexcp.core.errors import UnsupportedError
from flexcp.core.model_shape import ModelShape

# Held to one process by the tests. Others may mix tokens outside of attention (convolutions, state spaces,
# chunked layers), and then train on wrong gradients with a loss that hardly shows it.
SUPPORTED_MODELS = ("llama", "mistral", "qwen2", "qwen3")

# These scale the rotary table by the longest position *seen*, which differs between the ranks of a group.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def shape_of(config: Any) -> ModelShape:
    """The shape of a text model (Llama, Qwen3 and models with the same config names)."""
    heads = config.num_attention_heads
    return ModelShape(
        name=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
    )


def check_supported(config: Any) -> None:
    """Refuse by name, before step 0, what would be wrong under a changing degree.

    Raises:
        UnsupportedError: another kind of model, layers that are not full attention, length-dependent rotary
            scaling, or attention dropout.
    """
    if config.model_type not in SUPPORTED_MODELS:
        raise UnsupportedError(
            f"models of type {config.model_type!r} have not been shown to train correctly",
            f"Supported: {', '.join(SUPPORTED_MODELS)}.",
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds or windowed:
        raise UnsupportedError(
            f"some layers are not full attention ({', '.join(sorted(kinds)) or 'sliding_window'})",
            "Set use_sliding_window to false or sliding_window to null, or train without FlexCP.",
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise UnsupportedError(
            f"rope_type {kind!r} depends on the longest position a rank sees, which differs inside a group",
            "Use a fixed rope_type (default, linear, yarn, llama3).",
        )
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedError(
            f"attention_dropout is {config.attention_dropout}", "Set attention_dropout to 0."
        )
