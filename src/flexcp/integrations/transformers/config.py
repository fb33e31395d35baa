"""Reads what FlexCP needs from a transformers config, and refuses configs it would compute wrongly."""

from __future__ import annotations

from typing import Any

from flexcp.core.errors import UnsupportedError
from flexcp.core.model_shape import ModelShape

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
        UnsupportedError: length-dependent rotary scaling, attention dropout, or a sliding window.
    """
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
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UnsupportedError(
            "some layers use a sliding window", "Set use_sliding_window to false, or train without FlexCP."
        )
