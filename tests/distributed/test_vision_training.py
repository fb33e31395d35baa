"""`flexcp train` on rows of text and images, from files to a checkpoint, on one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image

from tests.distributed.test_training import losses
from tests.vision_models import FAMILIES, run_vision_config

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def write_data(folder: Path) -> None:
    """Images of one colour, a text that names it; some rows with several images, some with none."""
    folder.mkdir()
    rows = []
    for number in range(16):
        name = list(COLOURS)[number % 4]
        if number % 5 == 4:
            rows.append({"text": "no image at all " * (1 + number), "images": []})
            continue
        paths = []
        for part in range(1 + number % 3):
            path = f"{number}-{part}.png"
            Image.new("RGB", (40 + 10 * number, 60), COLOURS[name]).save(folder / path)
            paths.append(path)
        rows.append({"text": "<image>" * len(paths) + name * (1 + number % 7), "images": paths})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def make_config(folder: Path, family: str) -> Any:
    from flexcp.train.config import TrainConfig

    return TrainConfig.model_validate(
        {
            "model": {"config": folder / family},
            "data": {
                "path": str(folder / "data"),
                "pattern": "*.jsonl",
                "image_column": "images",
                "eval_samples": 2,
                "max_tokens": 1000,
            },
            "parallel": {"tokens_per_rank": 400, "whole_below_tokens": 16, "learn_costs": False},
            "optimizer": {"lr": 1e-2},
            "run": {"folder": folder / f"run-{family}", "steps": 4, "global_batch": 14, "timeout_s": 60},
        }
    )


def one_process(folder: Path, family: str) -> float:
    """Loss of the first step by plain transformers, sample by sample."""
    from flexcp.cost.calibration import hardware_at
    from flexcp.train.corpus import Images, open_corpus
    from flexcp.train.images import model_images, price_of
    from flexcp.train.model import build_model, model_config

    config = make_config(folder, family)
    hf_config = model_config(config.model, 257, 1000)
    price = price_of(hf_config, hardware_at("cpu"), checkpointing=False)
    images = Images(model_images(hf_config, folder / family), price)
    corpus = open_corpus(config.data, lambda _: 1000, 0, lambda *_: None, images)
    model: Any = build_model(hf_config, config.run, torch.device("cpu"))
    total, count = 0.0, 0
    for index in range(len(corpus.train)):
        example = {name: torch.as_tensor(value) for name, value in corpus.train[index].items()}
        ids, labels = example.pop("input_ids")[None], example.pop("labels")[1:]
        types = (ids == hf_config.image_token_id).int()
        name = {"qwen3_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}.get(family)
        extra = {name: types} if name and types.any() else {}
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **example, **extra).logits[0, :-1]
        total += float(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


@pytest.fixture
def one_rank_world(tmp_path: Path) -> Iterator[None]:
    """A world of one rank, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank_world")
def test_images_from_files_to_the_loss(tmp_path: Path) -> None:
    """The first step's loss is that of one process; four steps learn"""
    from flexcp.runtime.launch import World
    from flexcp.train.trainer import train

    write_data(tmp_path / "data")
    for family in FAMILIES:
        run_vision_config(family).save_pretrained(tmp_path / family)
        settings = {"size": {"shortest_edge": 256, "longest_edge": 9216}, "max_patches": 3}
        (tmp_path / family / "preprocessor_config.json").write_text(json.dumps(settings))
    world = World(rank=0, size=1, local_size=1, device=torch.device("cpu"))
    for family in FAMILIES:
        evaluated = train(world, make_config(tmp_path, family), quiet=True).eval_losses
        curve = losses(tmp_path / f"run-{family}")
        assert curve[0] == pytest.approx(one_process(tmp_path, family), rel=1e-5), family
        assert curve[3] < curve[0]
        assert sorted(evaluated) == [4]
