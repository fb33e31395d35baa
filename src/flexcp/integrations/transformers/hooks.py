"""Switches a model to FlexCP attention and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flexcp.core.errors import UnsupportedError
from flexcp.integrations.transformers.attention import flexcp_attention, flexcp_mask
from flexcp.integrations.transformers.config import check_supported

NAME = "flexcp"


@contextmanager
def enable(model: nn.Module) -> Iterator[nn.Module]:
    """Run `model` with FlexCP attention inside the block.

    The model is called as `model(**micro.inputs)`; outside the block it is what it was before. The name
    `flexcp` stays in transformers' registries, where it harms nobody.

    Args:
        model: a `PreTrainedModel`, bare or wrapped by DistributedDataParallel or FSDP2.

    Raises:
        UnsupportedError: not a transformers model, or one whose attention would come out wrong.
    """
    inner: Any = getattr(model, "module", model)
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedError(
            f"{type(inner).__name__} is not a transformers model",
            "Call flexcp.attention.group_attention in your own attention layer.",
        )
    check_supported(inner.config)
    before, cached = inner.config._attn_implementation, inner.config.use_cache
    AttentionInterface.register(NAME, flexcp_attention)
    AttentionMaskInterface.register(NAME, flexcp_mask)
    inner.set_attn_implementation(NAME)
    if inner.config._attn_implementation != NAME:
        raise UnsupportedError(
            f"{type(inner).__name__} does not take its attention from the registry of transformers",
            "Models written before that registry cannot be used.",
        )
    inner.config.use_cache = False
    try:
        yield model
    finally:
        inner.set_attn_implementation(before)
        inner.config.use_cache = cached


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated decoder layers of a transformers text model, each a unit for FSDP2."""
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList):
            return list(layers)
    raise UnsupportedError(f"{type(model).__name__} has no list of layers", "Pass the blocks yourself.")
