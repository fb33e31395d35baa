"""Tiny vision-language models with random images, and the one-process reference for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    InternVLConfig,
    Qwen3VLConfig,
)

from flexcp.core.sample import Sample

VOCAB, IMAGE, VIDEO = 97, 90, 91  # tokens of images and videos are the last of the vocabulary
TEXT = 80
FAMILIES = ("qwen3_vl", "gemma3", "internvl")

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
}
# Images of 4 tokens and a window of 3 rows: a window that ends inside an image.
_GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
_QWEN = {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}


def tiny_vision_config(family: str, **text: Any) -> Any:
    """Two layers in front, two behind."""
    if family == "qwen3_vl":
        rope = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        }
        return Qwen3VLConfig(
            text_config={**_TEXT, "rope_parameters": rope, **text},
            vision_config={
                **_QWEN,
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
            },
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            tie_word_embeddings=False,
        )
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    if family == "gemma3":
        return Gemma3Config(
            text_config={**_TEXT, "query_pre_attn_scalar": 8, **_GEMMA, **text},
            vision_config={**vision, "image_size": 8, "patch_size": 2, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
            tie_word_embeddings=False,
        )
    return InternVLConfig(
        text_config={"model_type": "qwen3", **_TEXT, **text},
        vision_config={**vision, "image_size": [8, 8], "patch_size": [2, 2]},
        image_token_id=IMAGE,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )


def run_vision_config(family: str) -> Any:
    """The same for data from disk, whose text is bytes: special tokens lie behind them."""
    config = tiny_vision_config(family, vocab_size=300)
    config.image_token_id, config.tie_word_embeddings = 290, False
    if family == "qwen3_vl":
        config.video_token_id, config.vision_start_token_id, config.vision_end_token_id = 291, 292, 293
        config.vision_config.patch_size = 8
    if family == "gemma3":
        config.boi_token_index, config.eoi_token_index = 292, 293
    return config


def tiny_vision_model(family: str, **text: Any) -> Any:
    """A model of a few thousand weights, the same on every call."""
    torch.manual_seed(7)
    model = AutoModelForImageTextToText.from_config(tiny_vision_config(family, **text))
    with torch.no_grad():
        for parameter in model.parameters():  # what is zero at first has no gradient behind it
            if not parameter.any():
                parameter.normal_(std=0.1)
    return model.train()


# What samples are made of: numbers of text tokens, ("image", height, width) in merged patches, and
# ("video", frames, height, width). Image and text runs alternate.
Parts = Sequence[Any]

MIXED: list[Parts] = [
    [9, ("image", 3, 4), 20],
    [31],
    [5, ("image", 1, 1), 2, ("image", 4, 5), 3, ("image", 2, 2), 40],
    [1, ("image", 6, 6)],
    [4, ("video", 7, 2, 2), 6],
    [2, ("image", 2, 3), 5, ("video", 3, 2, 1), 11],
    [64],
    [3],
    [12, ("image", 8, 8), 1],
]


class VisionDataset:
    """Random samples of text and images, as a processor gives them."""

    def __init__(self, family: str, samples: Sequence[Parts], seed: int = 0) -> None:
        self.family = family
        generator = np.random.default_rng(seed)
        self.examples = [self._example(parts, generator, i) for i, parts in enumerate(samples)]
        self.lengths = np.array([len(e["input_ids"]) for e in self.examples], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.examples[index]

    def sample(self, index: int) -> Sample:
        """As the planner is to see it."""
        ids = self.examples[index]["input_ids"]
        return Sample(index, len(ids), image_spans(ids) if self.family == "gemma3" else ())

    def _example(self, parts: Parts, generator: Any, index: int) -> dict[str, Any]:
        ids: list[int] = []
        pixels: dict[str, list[Any]] = {"image": [], "video": []}
        grids: dict[str, list[list[int]]] = {"image": [], "video": []}
        for part in parts:
            if isinstance(part, int):
                ids += generator.integers(0, TEXT, part).tolist()
                continue
            kind, (*frames, height, width) = part[0], part[1:]
            count = frames[0] if frames else 1
            if self.family == "qwen3_vl":
                grids[kind].append([count, 2 * height, 2 * width])
                pixels[kind].append(generator.normal(size=(count * 4 * height * width, 24)))
                tokens, token = height * width, VIDEO if kind == "video" else IMAGE
            else:
                pixels["image"].append(generator.normal(size=(count, 3, 8, 8)))
                tokens, token = 4, IMAGE
            for _ in range(count):
                ids += [int(generator.integers(0, TEXT)), *[token] * tokens]
            ids.append(int(generator.integers(0, TEXT)))
        labels = np.array(ids)
        labels[(generator.random(len(ids)) < (index % 4) / 5) | (labels >= TEXT)] = -100
        example: dict[str, Any] = {"input_ids": np.array(ids), "labels": labels}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels[kind]:
                example[name] = np.concatenate(pixels[kind]).astype(np.float32)
            if grids[kind]:
                example[f"{kind}_grid_thw"] = np.array(grids[kind])
        return example


def image_spans(ids: Any) -> tuple[tuple[int, int], ...]:
    """Runs of image tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], np.asarray(ids) == IMAGE, [False]])))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))


def model_keywords(family: str, example: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a plain call of the model with one sample."""
    ids = torch.as_tensor(example["input_ids"])[None]
    keywords = {k: torch.as_tensor(v) for k, v in example.items() if "pixel" in k or "grid" in k}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if family == "qwen3_vl":
        keywords["mm_token_type_ids"] = types
    if family == "gemma3":
        keywords["token_type_ids"] = types
    return {"input_ids": ids, "use_cache": False, **keywords}


def vision_reference(model: Any, dataset: VisionDataset, indices: Sequence[int]) -> float:
    """Loss and `.grad` of the samples run one by one, by plain transformers."""
    total, count = torch.zeros(()), 0
    for index in indices:
        example = dataset[index]
        targets = torch.as_tensor(example["labels"])[1:]
        logits = model(**model_keywords(dataset.family, example)).logits[0, :-1]
        total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
    loss = total / count
    loss.backward()
    return float(loss.detach())
