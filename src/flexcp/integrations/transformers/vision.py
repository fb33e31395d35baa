"""Images in front of the language model: encoded once inside a group, merged before the rows are cut.

Called by the hook in front of the model's own forward, also inside DDP and FSDP2: the micro-batch's keywords
become those of a model whose images are encoded already, with features of the image rows that lie here and
positions that were counted on the whole sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexcp.core.errors import DataError, UnsupportedError
from flexcp.integrations.transformers.encoders import Family, require_spans
from flexcp.integrations.transformers.sharing import SampleImages, make_route, share_features
from flexcp.runtime.batches import Example, TaskContext


def require_encoder_outputs(model: Any) -> None:
    """Models of an older transformers would drop the features in silence.

    Raises:
        UnsupportedError: the forward of the model does not take features that are encoded already.
    """
    if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
        raise UnsupportedError(
            f"{type(model).__name__} of this transformers takes no images that are encoded already",
            "Vision-language models need a transformers whose forward has mm_encoder_outputs (5.24 has it).",
        )


def vision_inputs(
    model: Any, family: Family, context: TaskContext, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords of the forward that a pack with images needs beside its rows; none for most packs of text.

    Raises:
        DataError: a sample whose tokens, images and spans do not fit together; it is named.
    """
    images = _images(family, context)
    ids: Tensor = keywords["input_ids"]
    embeddings = model.get_input_embeddings().weight
    trained = any(p.requires_grad for name in family.modules for p in getattr(model.model, name).parameters())
    if not images:
        if not trained or embeddings.requires_grad:
            return {}
        # A projector is trained before a frozen language model. Other ranks of the group have gradients to
        # pass through it, so this one runs its backward too: from features of no row.
        nothing = torch.zeros(
            (0, family.width), dtype=embeddings.dtype, device=ids.device, requires_grad=True
        )
        return {"mm_encoder_outputs": family.outputs(nothing, ids)}
    features = _features(model, family, context, images, embeddings.dtype, ids.device, trained=trained)
    inputs: dict[str, Any] = {"mm_encoder_outputs": family.outputs(features, ids)}
    positions = _positions(model, family, context, images)
    if positions is not None:
        inputs["position_ids"] = positions[:, None].to(ids.device)
    return inputs


def _images(family: Family, context: TaskContext) -> dict[int, SampleImages]:
    """Of every sample of the pack that this rank holds and that has some."""
    found = {}
    for index, example in context.examples.items():
        sample = context.layout.samples[index]
        try:
            images = family.images(example)
            require_spans(sample, family.mask_spans(images) if images else ())
        except DataError as error:
            raise DataError(f"sample {sample.id} of the data set: {error.cause}", error.remedy) from None
        if images:
            found[index] = images
    return found


def _features(
    model: Any,
    family: Family,
    context: TaskContext,
    images: Mapping[int, SampleImages],
    dtype: torch.dtype,
    device: torch.device,
    *,
    trained: bool,
) -> Tensor:
    """[image rows of this rank, width], in the order of the rows."""
    route = make_route(context.layout, context.exchange.member, images)
    parts: list[tuple[Example, int]] = [(context.examples[index], unit) for index, unit in route.encode]
    if parts:
        features = family.encode(model, parts, device).to(dtype)
    else:
        features = torch.zeros((0, family.width), dtype=dtype, device=device)
    return share_features(features, route, context.exchange, trained=trained)


def _positions(
    model: Any, family: Family, context: TaskContext, images: Mapping[int, SampleImages]
) -> Tensor | None:
    """[axes, T]: cut from the positions of whole samples; None where counting rows is right."""
    whole = {index: family.positions(model, context.examples[index]) for index in images}
    axes = next((len(positions) for positions in whole.values() if positions is not None), 0)
    if not axes:
        return None
    parts = []
    for piece in context.layout.pieces(context.exchange.member):
        positions = whole.get(piece.index)
        if positions is None:
            positions = torch.arange(piece.stop).expand(axes, -1)
        parts.append(positions[:, piece.start : piece.stop])
    return torch.cat([*parts, torch.zeros((axes, context.padding_rows), dtype=torch.int64)], dim=1)
