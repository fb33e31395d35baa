"""What the model of a run makes of images: its processor's arithmetic, its tokens, and its pixels.

The processors are those of transformers that need neither torchvision nor a download. Their settings are in
a `processor_config.json` or `preprocessor_config.json` beside the model's config, or follow from the config.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import ConfigError
from flexcp.core.images import FixedSize, ImageRule, RowsOfImages, SmartResize, Tiles
from flexcp.core.sample import Sample
from flexcp.cost.encoder import image_sample
from flexcp.cost.presets import Hardware
from flexcp.integrations.transformers import shape_of
from flexcp.train.data.tokenizers import FileTokenizer, Tokenizer


@dataclass(frozen=True)
class ModelImages:
    """Implements `data.pictures.ImageFormat` for one model.

    Attributes:
        rule: tokens from sizes.
        token: stands for every feature of an image.
        before, after: tokens around an image.
        margin: text on both sides of those tokens, which is encoded together with the text next to it.
        processor: of transformers, by PIL and numpy.
        fingerprint: of model kind, tokens and settings.
    """

    rule: ImageRule
    token: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    margin: str
    processor: Any
    fingerprint: str

    def pixels(self, images: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        """`pixel_values`, and for Qwen-VL `image_grid_thw`."""
        out = self.processor(list(images), return_tensors="np")
        return {name: np.asarray(out[name]) for name in ("pixel_values", "image_grid_thw") if name in out}


def model_images(
    config: Any, folder: Path, tokenizer: Tokenizer | None = None, *, pretrained: bool = False
) -> ModelImages:
    """What a model makes of images.

    Args:
        config: of the model.
        folder: where its `config.json` is, or that file.
        tokenizer: of the run; the tokens around an image are its own where it has them.
        pretrained: the model was trained with settings of its own, so they must be there.

    Raises:
        ConfigError: a model without images, or settings that are missing or cannot be read.
    """
    makers = {"qwen3_vl": _qwen, "gemma3": _gemma, "internvl": _internvl}
    if config.model_type not in makers:
        raise ConfigError(
            f"data.image_column is given, and models of type {config.model_type!r} see no images",
            f"Such models are {', '.join(makers)}; or leave data.image_column out.",
        )
    settings = _settings(folder if folder.is_dir() else folder.parent, needed=pretrained)
    rule, processor = makers[config.model_type](config, settings)
    before, after, margin = _frame(config, tokenizer)
    told = json.dumps([config.model_type, config.image_token_id, before, after, margin, repr(rule)])
    fingerprint = hashlib.sha256(told.encode()).hexdigest()[:16]
    return ModelImages(rule, int(config.image_token_id), before, after, margin, processor, fingerprint)


def _settings(folder: Path, *, needed: bool) -> dict[str, Any]:
    """Of the image processor, as transformers finds them: transformers 5 writes them into the processor's."""
    for name, key in (("processor_config.json", "image_processor"), ("preprocessor_config.json", None)):
        path = folder / name
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            settings = found if key is None or found is None else found.get(key)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read ({error})", "Take it from the same model.") from error
        if settings is not None:
            return dict(settings)
    if needed:
        raise ConfigError(
            f"model.pretrained {folder} has images, and neither processor_config.json nor "
            "preprocessor_config.json",
            "Copy them from the model that it was made of: they say how its images were cut.",
        )
    return {}


# Tokens around an image by the names that tokenizers have for them, and what they usually are.
_FRAMES = {
    "qwen3_vl": (("vision_start_token", "<|vision_start|>"), ("vision_end_token", "<|vision_end|>")),
    "gemma3": (("boi_token", "<start_of_image>"), ("eoi_token", "<end_of_image>")),
    "internvl": (("start_image_token", "<img>"), ("end_image_token", "</img>")),
}
_IN_CONFIG = {
    "qwen3_vl": ("vision_start_token_id", "vision_end_token_id"),
    "gemma3": ("boi_token_index", "eoi_token_index"),
}


def _frame(config: Any, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Tokens before and after an image, and the text around them, as the model's processor has them.

    A tokenizer of other data has no such tokens: they are the config's then, and none where it names none.
    """
    kind = config.model_type
    margin = "\n\n" if kind == "gemma3" else ""
    if isinstance(tokenizer, FileTokenizer):
        ids = [tokenizer.special_id(name, usual) for name, usual in _FRAMES[kind]]
        if None not in ids:
            return (ids[0],), (ids[1],), margin  # type: ignore[return-value]
    told = [int(getattr(config, name)) for name in _IN_CONFIG.get(kind, ())]
    return tuple(told[:1]), tuple(told[1:]), margin


def price_of(
    config: Any, hardware: Hardware, *, checkpointing: bool
) -> Callable[[int, RowsOfImages], Sample]:
    """How the planner sees a sample: its length, its mask, and the work of the encoder."""
    shape = shape_of(config)
    return lambda index, rows: image_sample(index, rows, shape, hardware, checkpointing=checkpointing)


_Made = tuple[ImageRule, Any]


def _qwen(config: Any, settings: dict[str, Any]) -> _Made:
    from transformers import Qwen2VLImageProcessorPil

    vision = config.vision_config
    sides = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    # Bounds as published for Qwen3-VL, where the model says none.
    usual = SmartResize()
    bounds = {"shortest_edge": usual.least_pixels, "longest_edge": usual.most_pixels}
    merged = {**sides, "size": bounds, **_known(settings, "size", "min_pixels", "max_pixels"), **sides}
    rule = SmartResize.from_settings(merged)
    size = {"shortest_edge": rule.least_pixels, "longest_edge": rule.most_pixels}
    processor = Qwen2VLImageProcessorPil(**sides, size=size, **_known(settings, "image_mean", "image_std"))
    return rule, processor


def _gemma(config: Any, settings: dict[str, Any]) -> _Made:
    from transformers import Gemma3ImageProcessorPil

    vision = config.vision_config
    if settings.get("do_pan_and_scan"):
        raise ConfigError(
            "the image processor's settings ask for do_pan_and_scan",
            "Set it to false: crops are not cut here.",
        )
    rule = FixedSize(vision.image_size, vision.patch_size, config.mm_tokens_per_image)
    size = {"height": vision.image_size, "width": vision.image_size}
    processor = Gemma3ImageProcessorPil(size=size, **_known(settings, "image_mean", "image_std"))
    return rule, processor


def _internvl(config: Any, settings: dict[str, Any]) -> _Made:
    from transformers import GotOcr2ImageProcessorPil

    (side, _), (patch, _) = config.vision_config.image_size, config.vision_config.patch_size
    tokens = int((side // patch) ** 2 * config.downsample_ratio**2)
    crop = bool(settings.get("crop_to_patches", False))
    bounds = {"min_patches": settings.get("min_patches", 1), "max_patches": settings.get("max_patches", 12)}
    rule = Tiles(side, patch, tokens, bounds["min_patches"], bounds["max_patches"] if crop else 1)
    size = {"height": side, "width": side}
    statistics = _known(settings, "image_mean", "image_std")
    processor = GotOcr2ImageProcessorPil(size=size, crop_to_patches=crop, **bounds, **statistics)
    return rule, processor


def _known(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names if settings.get(name) is not None}
