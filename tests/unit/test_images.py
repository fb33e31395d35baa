"""Tokens and patches from image sizes, held to the processors of transformers; samples made from them."""

from __future__ import annotations

import ast
import inspect
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tests.vision_models import FAMILIES, tiny_vision_model
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flexcp.core.errors import InputError
from flexcp.core.images import FixedSize, Picture, SmartResize, Tiles, lay_out
from flexcp.core.model_shape import Encoder, ModelShape, model_shape
from flexcp.core.sample import Sample
from flexcp.cost import hardware
from flexcp.cost.encoder import encoded, encoder_pairs, image_sample
from flexcp.integrations.transformers import shape_of

CHANCE = random.Random(3)
SIZES = [(CHANCE.randint(1, 2000), CHANCE.randint(1, 2000)) for _ in range(300)]
SIZES = [(h, w) for h, w in SIZES if max(h, w) <= 200 * min(h, w)] + [(32, 6400), (448, 448), (896, 1792)]
SMALL = [(37, 61), (12, 90), (64, 64)]


def black(height: int, width: int) -> Any:
    return np.zeros((3, height, width), dtype=np.uint8)


def test_images_of_qwen() -> None:
    """By the processor's arithmetic on many sizes, and by its output on some."""
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    settings["size"] = {"shortest_edge": 65_536, "longest_edge": 1_000_000}  # type: ignore[assignment]
    processor = Qwen2VLImageProcessorPil(**settings)
    rule = SmartResize.from_settings(settings)
    for height, width in SIZES:
        patches = processor.get_number_of_image_patches(height, width)
        assert rule.image(height, width) == Picture((patches // 4,), (patches,)), (height, width)
    out = processor([black(*size) for size in SMALL], return_tensors="np")
    grids = out["image_grid_thw"].prod(axis=1).tolist()
    assert [rule.image(*size).patches[0] for size in SMALL] == grids
    assert len(out["pixel_values"]) == sum(grids)


def smart_resize_of_videos() -> Any:
    """The installed processor's own function; its module asks for torchvision, the function does not."""
    path = Path(inspect.getfile(transformers)).parent / "models/qwen3_vl/video_processing_qwen3_vl.py"
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if getattr(node, "name", "") == "smart_resize"]
    space: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(found, []), str(path), "exec"), space)
    return space["smart_resize"]


def test_videos_of_qwen() -> None:
    """Frames come in pairs; the area of all of them is bounded, with and without a cap for each."""
    theirs = smart_resize_of_videos()
    bounds = {"shortest_edge": 131_072, "longest_edge": 786_432}
    images = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": bounds}
    capped = {"size": bounds, "cap_pixels_per_frame": True, "max_video_tokens": 64}
    for index, (height, width) in enumerate(SIZES):
        frames = 2 + index % 63
        for settings in ({"size": bounds}, capped):
            most = bounds["longest_edge"]
            if settings is capped:
                most = frames * max(min(64 * 32 * 32, most // frames), int(131_072 * 1.05))
            try:
                high, wide = theirs(frames, height, width, 2, 32, 131_072, most)
            except ValueError:
                continue
            picture = SmartResize.from_settings(images, settings, between=9).video(frames, height, width)
            runs, patches = -(-frames // 2), high * wide // 256
            assert picture == Picture((patches // 4,) * runs, (patches,) * runs, 9), (frames, height, width)
            assert picture.tokens == runs * patches // 4 + 9 * (runs - 1)


def test_images_of_gemma() -> None:
    processor = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    out = processor([black(*size) for size in SMALL], return_tensors="np")
    for size, pixels in zip(SMALL, out["pixel_values"], strict=True):
        picture = FixedSize().image(*size)
        assert picture.patches == (pixels[0].size // 14**2,)
        assert picture.runs == (256,)


def test_tiles_of_internvl() -> None:
    """Arrangement and thumbnail; and images left whole."""
    for least, most in ((1, 12), (2, 6), (1, 1)):
        processor = GotOcr2ImageProcessorPil(
            size={"height": 448, "width": 448}, min_patches=least, max_patches=most, crop_to_patches=True
        )
        rule = Tiles(least=least, most=most)
        for height, width in SIZES:
            tiles = processor.get_number_of_image_patches(height, width)
            assert rule.image(height, width) == Picture((256 * tiles,), (1024,) * tiles)
        out = processor(black(600, 1900), return_tensors="np")
        assert len(out["pixel_values"]) == len(rule.image(600, 1900).patches)


def test_rows_of_a_sample() -> None:
    """Neighbouring pictures are one run to the model; a video's frames are not."""
    rows = lay_out([Picture((4,), (16,)), Picture((2,), (8,)), 3, Picture((5, 5), (20, 20), between=1)])
    assert (rows.tokens, rows.spans, rows.patches) == (20, ((0, 6), (9, 14), (15, 20)), (16, 8, 20, 20))


def test_sizes_that_no_processor_takes_are_refused() -> None:
    for make in (SmartResize().image, FixedSize().image, Tiles().image):
        for size in ((0, 5), (1, 201)):
            with pytest.raises(InputError, match=rf"an image has {size[0]} x {size[1]} pixels"):
                make(*size)
    with pytest.raises(InputError, match="a video has 1 frames\nGive at least 2"):
        SmartResize().video(1, 64, 64)
    with pytest.raises(InputError, match="name no bounds of the image's area"):
        SmartResize.from_settings({"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2})


def test_samples_for_the_planner() -> None:
    """Causal images bring encoder work alone; images that attend both ways bring their spans, too."""
    rows = lay_out([10, Picture((6,), (24,)), 4])
    h100, qwen = hardware("h100"), model_shape("qwen3-vl-8b")
    pairs = encoder_pairs([24], qwen, h100)
    assert image_sample(5, rows, qwen, h100) == Sample(5, 20, (), pairs)

    both = Encoder(2, 8, 16, 4, both_ways=True)
    gemma = ModelShape("tiny", 2, 8, 2, 1, 4, 16, 50, extra_parameters=5000, encoder=both)
    sample = image_sample(5, rows, gemma, h100)
    assert (sample.spans, sample.encoder_pairs) == (((10, 16),), encoder_pairs([24], gemma, h100))
    assert encoded(Sample(5, 20, ((10, 16),)), gemma, h100) == sample
    assert sample.work_pairs == 20 * 21 // 2 + 6 * 5 // 2 + sample.encoder_pairs


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_of_models_with_an_encoder(family: str) -> None:
    """Every weight that is a matrix is counted, and the encoder is the model's."""
    model = tiny_vision_model(family)
    shape = shape_of(model.config)
    assert shape.parameters == pytest.approx(
        sum(p.numel() for p in model.parameters() if p.dim() > 1), rel=0.01
    )
    tower = model.model.visual if family == "qwen3_vl" else model.model.vision_tower
    layers = [
        m for m in tower.modules() if type(m).__name__.endswith(("Block", "EncoderLayer", "VisionLayer"))
    ]
    assert shape.encoder is not None
    assert len(layers) == shape.encoder.layers
    counted = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
    assert shape.encoder.parameters == counted
    assert shape.encoder.both_ways is (family == "gemma3")
    assert shape.encoder.window_patches == (16 if family == "internvl" else 0)
