"""What FlexCP knows of each family of vision-language models.

Which parts its encoder can run alone, where their features stand, and how they are handed to the model: by
its own `get_image_features` and `get_rope_index`, and the argument `mm_encoder_outputs` of its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling

from flexcp.core.errors import DataError
from flexcp.core.model_shape import Encoder
from flexcp.core.sample import Sample
from flexcp.integrations.transformers.sharing import Rows, SampleImages
from flexcp.runtime.batches import Example

Spans = tuple[tuple[int, int], ...]


class Family(Protocol):
    """One family, for one model."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of what stands before the language model, inside `model.model`."""

    @property
    def width(self) -> int:
        """Of what `encode` gives per feature."""

    def images(self, example: Example) -> SampleImages | None:
        """What is to be encoded for a sample; None where it has no image."""

    def mask_spans(self, images: SampleImages) -> Spans:
        """Rows that attend to each other both ways in the language model."""

    def encode(self, model: Any, parts: Sequence[tuple[Example, int]], device: torch.device) -> Tensor:
        """Features [rows, width] of some parts of some samples, one after the other."""

    def outputs(self, features: Tensor, input_ids: Tensor) -> dict[str, Any]:
        """`mm_encoder_outputs` from the features [rows, width] of the image rows among `input_ids`."""

    def positions(self, model: Any, example: Example) -> Tensor | None:
        """Positions of a whole sample [axes, L]; None where they count its rows."""


class QwenVL:
    """Qwen3-VL: frames of any size, three axes of positions, features for early layers too (deepstack)."""

    modules = ("visual",)

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        self._merge: int = vision.spatial_merge_size
        self._hidden: int = vision.out_hidden_size
        self._layers = len(vision.deepstack_visual_indexes)
        self._tokens = {"image": config.image_token_id, "video": config.video_token_id}
        self.width = self._hidden * (1 + self._layers)

    def images(self, example: Example) -> SampleImages | None:
        """Frames of images, then those of videos, as the model counts their features."""
        frames = self._frames(example)
        if not frames:
            return None
        units = tuple(height * width // self._merge**2 for _, _, _, height, width in frames)
        work = tuple((height * width) ** 2 for _, _, _, height, width in frames)
        ids = np.asarray(example["input_ids"])
        features = np.full(len(ids), -1, dtype=np.int64)
        first = 0
        for kind, token in self._tokens.items():
            rows = np.flatnonzero(ids == token)
            count = sum(n for n, frame in zip(units, frames, strict=True) if frame[0] == kind)
            require_count(len(rows), count, kind)
            features[rows] = np.arange(first, first + count)
            first += count
        return SampleImages(units, work, features)

    def mask_spans(self, images: SampleImages) -> Spans:
        """None: the language model is causal throughout."""
        return ()

    def encode(self, model: Any, parts: Sequence[tuple[Example, int]], device: torch.device) -> Tensor:
        """All frames in one call."""
        pixels, grids = [], []
        for example, unit in parts:
            kind, start, stop, height, width = self._frames(example)[unit]
            pixels.append(as_tensor(example[_PIXELS[kind]])[start:stop])
            grids.append((1, height, width))
        grid = torch.tensor(grids, dtype=torch.int64, device=device)
        out = model.get_image_features(torch.cat(pixels).to(device), grid, return_dict=True)
        layers = [torch.cat(tuple(layer)) for layer in out.deepstack_features]
        return torch.cat([torch.cat(tuple(out.pooler_output)), *layers], dim=1)

    def outputs(self, features: Tensor, input_ids: Tensor) -> dict[str, Any]:
        """Features by kind, and by layer."""
        kinds = {kind: input_ids.reshape(-1) == token for kind, token in self._tokens.items()}
        is_image = kinds["image"] | kinds["video"]
        # Rows of none: the way to the others' gradients must not end here.
        some = [kind for kind, rows in kinds.items() if bool(rows.any())] or ["image"]
        layers = torch.split(features, self._hidden, dim=1)
        return {kind: self._output([layer[kinds[kind][is_image]] for layer in layers]) for kind in some}

    def _output(self, layers: Sequence[Tensor]) -> Any:
        first, *later = layers
        output: Any = BaseModelOutputWithPooling(pooler_output=(first,))  # type: ignore[arg-type]
        output.deepstack_features = [(layer,) for layer in later]
        return output

    def positions(self, model: Any, example: Example) -> Tensor | None:
        """[3, L]: time, height and width, by the model itself."""
        ids = as_tensor(example["input_ids"]).long()[None]
        types = torch.zeros_like(ids, dtype=torch.int32)
        types[ids == self._tokens["image"]] = 1
        types[ids == self._tokens["video"]] = 2
        grids = {name: as_tensor(example[name]).clone() for name in _GRIDS.values() if _given(example, name)}
        positions: Tensor = model.model.get_rope_index(ids, mm_token_type_ids=types, **grids)[0]
        return positions[:, 0]

    def _frames(self, example: Example) -> list[tuple[str, int, int, int, int]]:
        """Kind, rows of its pixels [start, stop), height and width in patches, of every frame."""
        frames: list[tuple[str, int, int, int, int]] = []
        for kind, name in _GRIDS.items():
            row = 0
            for time, height, width in np.asarray(example[name]).tolist() if _given(example, name) else ():
                for _ in range(time):
                    frames.append((kind, row, row + height * width, height, width))
                    row += height * width
            if row and len(example[_PIXELS[kind]]) != row:
                raise DataError(
                    f"its {_PIXELS[kind]} hold {len(example[_PIXELS[kind]])} patches, its {name} {row}",
                    "Both come from one call of the processor.",
                )
        return frames


_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


class FixedTiles:
    """Gemma 3 and InternVL: images as tiles of one size, each giving as many tokens.

    Args:
        config: of the model.
        tokens: features of a tile.
        both_ways: whether the tokens of an image attend to each other both ways.
    """

    modules = ("vision_tower", "multi_modal_projector")

    def __init__(self, config: Any, tokens: int, *, both_ways: bool) -> None:
        self.width = text_hidden(config)
        self._token: int = config.image_token_id
        self._tokens = tokens
        self._both_ways = both_ways

    def images(self, example: Example) -> SampleImages | None:
        """Tiles in the order of their pixels."""
        if not _given(example, "pixel_values"):
            return None
        tiles = len(example["pixel_values"])
        rows = np.flatnonzero(np.asarray(example["input_ids"]) == self._token)
        require_count(len(rows), tiles * self._tokens, "image")
        features = np.full(len(example["input_ids"]), -1, dtype=np.int64)
        features[rows] = np.arange(len(rows))
        return SampleImages((self._tokens,) * tiles, (1,) * tiles, features)

    def mask_spans(self, images: SampleImages) -> Spans:
        """Runs of image tokens, where the model attends both ways in them."""
        return runs(images.features >= 0) if self._both_ways else ()

    def encode(self, model: Any, parts: Sequence[tuple[Example, int]], device: torch.device) -> Tensor:
        """All tiles in one call."""
        pixels = torch.stack([as_tensor(example["pixel_values"][tile]) for example, tile in parts])
        out = model.get_image_features(pixels.to(device), return_dict=True)
        features: Tensor = out.pooler_output
        return features.reshape(-1, self.width)

    def outputs(self, features: Tensor, input_ids: Tensor) -> dict[str, Any]:
        """One image of as many tokens as there are here."""
        # A copy: the model returns it, and FSDP2 warns of views among what a model returns.
        return {"image": BaseModelOutputWithPooling(pooler_output=torch.stack([features]))}

    def positions(self, model: Any, example: Example) -> Tensor | None:
        """Rows are counted."""
        return None


def family_of(config: Any) -> Family | None:
    """The family of a model; None for text models."""
    match config.model_type:
        case "qwen3_vl":
            return QwenVL(config)
        case "gemma3":
            return FixedTiles(config, config.mm_tokens_per_image, both_ways=True)
        case "internvl":
            tokens = int(_tile_patches(config).patches * config.downsample_ratio**2)
            return FixedTiles(config, tokens, both_ways=False)
    return None


def vision_shape(config: Any) -> tuple[Encoder | None, int]:
    """The encoder of a model, and the weights before its language model; none of a text model."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None, 0
    hidden, out, wide = vision.hidden_size, text_hidden(config), vision.intermediate_size
    if config.model_type == "qwen3_vl":
        merged = vision.spatial_merge_size**2
        encoder = Encoder(vision.depth, hidden, wide, merged)
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        mergers = 1 + len(vision.deepstack_visual_indexes)
        projector = mergers * merged * hidden * (merged * hidden + out)
        return encoder, encoder.parameters + projector + hidden * (pixels + vision.num_position_embeddings)
    tile = _tile_patches(config)
    pixels = vision.num_channels * tile.pixels_of_a_patch
    if config.model_type == "gemma3":
        encoder = Encoder(
            vision.num_hidden_layers, hidden, wide, tile.patches // config.mm_tokens_per_image, both_ways=True
        )
        projector = hidden * out
    else:
        merged = round(1 / config.downsample_ratio**2)
        encoder = Encoder(vision.num_hidden_layers, hidden, wide, merged, window_patches=tile.patches)
        projector = merged * hidden * out + out * out
    return encoder, encoder.parameters + projector + hidden * (pixels + tile.patches)


def text_hidden(config: Any) -> int:
    """Width of the language model."""
    return int(config.get_text_config().hidden_size)


class _Tile(NamedTuple):
    patches: int
    pixels_of_a_patch: int


def _tile_patches(config: Any) -> _Tile:
    """Of the one size of images that Gemma 3 and InternVL know."""
    vision = config.vision_config
    sides, patch = (
        value if isinstance(value, list | tuple) else (value, value)
        for value in (vision.image_size, vision.patch_size)
    )
    return _Tile((sides[0] // patch[0]) * (sides[1] // patch[1]), patch[0] * patch[1])


def require_count(tokens: int, features: int, kind: str) -> None:
    """D54: features are merged only where they belong, so there is one for every token.

    Raises:
        DataError: there is not.
    """
    if tokens != features:
        raise DataError(
            f"it has {tokens} {kind} tokens, and its {kind}s give {features} features",
            "Text and images come from one call of the processor, and nothing may be cut off afterwards.",
        )


def require_spans(sample: Sample, spans: Spans) -> None:
    """The mask of the plan is the mask of the model.

    Raises:
        DataError: the data set told the planner of other spans.
    """
    if sample.spans != spans:
        raise DataError(
            f"its plan was made with the full-attention spans {_shown(sample.spans)}; "
            f"the model has {_shown(spans)}",
            "The data set's method `sample` must give them: see flexcp.image_sample.",
        )


def _shown(spans: Spans) -> str:
    return ", ".join(f"[{a}, {b})" for a, b in spans[:3]) + (" …" if len(spans) > 3 else "") or "none"


def runs(chosen: Any) -> Spans:
    """Half-open ranges of consecutive true entries.

    >>> runs([False, True, True, False, True])
    ((1, 3), (4, 5))
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(chosen, dtype=np.int8), [0]])))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def as_tensor(value: Any) -> Tensor:
    """Of what a data set gives: an array, a tensor or a list."""
    return value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))


def _given(example: Mapping[str, Any], name: str) -> bool:
    return example.get(name) is not None and len(example[name]) > 0


__all__ = ["Family", "Rows", "family_of"]
