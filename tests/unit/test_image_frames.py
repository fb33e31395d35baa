"""Ids of text with images, held to the processors of transformers; settings where transformers puts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from PIL import Image
from tests.models import tiny_model
from tests.vision_models import FAMILIES, run_vision_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma3Processor,
    InternVLProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen3VLProcessor,
)

from flexcp.core.errors import ConfigError
from flexcp.train.data import ByteTokenizer, FileTokenizer, open_documents
from flexcp.train.data.pictures import PictureDataset, PictureRows, open_picture_index
from flexcp.train.export import save_pretrained
from flexcp.train.images import model_images

# By family: names of special tokens in the tokenizer, and how its processor is told of an image.
SPECIAL = {
    "qwen3_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "gemma3": {"image_token": "<image_soft_token>", "boi_token": "<boi>", "eoi_token": "<eoi>"},
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
    },
}
PLACE = {
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<boi>",
    "internvl": "<IMG_CONTEXT>",
}
TEXT = "one\n<image> two\n\n<image>\nthree<image><image>"


def make_tokenizer(family: str) -> Any:
    """Merges new lines, as Gemma's does, and begins a text with a token of its own."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", *SPECIAL[family].values()]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(["\n\n\n\n\n\n two\n\n\n"] * 20, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.token_to_id("<bos>"))]
    )
    kind: Any = PreTrainedTokenizerFast
    return kind(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", extra_special_tokens=SPECIAL[family]
    )


def make_processor(family: str, form: Any, tokenizer: Any) -> Any:
    if family == "qwen3_vl":
        qwen: Any = Qwen3VLProcessor
        return qwen(form.processor, tokenizer, None)
    kind: Any = {"gemma3": Gemma3Processor, "internvl": InternVLProcessor}[family]
    return kind(image_processor=form.processor, tokenizer=tokenizer, image_seq_length=4)


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors look for the class of their videos, which cannot be loaded without torchvision."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)


@pytest.fixture
def rows(tmp_path: Path) -> PictureRows:
    names = []
    for number, size in enumerate([(33, 70), (64, 64), (150, 31), (40, 40)]):
        Image.new("RGB", size, (40 * number, 9, 200)).save(tmp_path / f"{number}.png")
        names.append(f"{number}.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": TEXT, "images": names}))
    return PictureRows(open_documents(tmp_path / "rows.jsonl"), "images", tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_processor(family: str, rows: PictureRows, tmp_path: Path) -> None:
    """Tokens around images, new lines that merge with the text next to them, one begin token."""
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(tmp_path)
    config = run_vision_config(family)
    image_token = next(iter(SPECIAL[family].values()))
    config.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
    own = FileTokenizer(tmp_path)
    form = model_images(config, tmp_path, own)
    index = open_picture_index(rows, own, form, tmp_path / "index", lambda *_: None)
    data = PictureDataset(rows, own, form, index, max_tokens=None, too_long="error", remedy="")

    processor = make_processor(family, form, tokenizer)
    text = TEXT.replace("<image>", PLACE[family])
    if family == "internvl":
        expected = processor(images=rows.images(0), text=[text], images_kwargs={"crop_to_patches": False})
    else:
        expected = processor(images=rows.images(0), text=[text])
    assert data[0]["input_ids"].tolist() == [*expected["input_ids"][0], own.eos_id]
    assert data.lengths[0] == len(data[0]["input_ids"])


def test_a_tokenizer_without_such_tokens_leaves_them_to_the_config(tmp_path: Path) -> None:
    for tokenizer in (None, ByteTokenizer()):
        frames = [model_images(run_vision_config(family), tmp_path, tokenizer) for family in FAMILIES]
        assert [(f.before, f.after, f.margin) for f in frames] == [
            ((292,), (293,), ""),
            ((292,), (293,), "\n\n"),
            ((), (), ""),
        ]


def test_settings_are_found_as_transformers_writes_them(tmp_path: Path) -> None:
    """Those inside of processor_config.json first; a pretrained model without any is refused."""
    config = run_vision_config("qwen3_vl")
    with pytest.raises(ConfigError, match=r"has images, and neither processor_config\.json nor"):
        model_images(config, tmp_path, pretrained=True)
    settings = {"size": {"shortest_edge": 256, "longest_edge": 9216}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert model_images(config, tmp_path, pretrained=True).rule.most_pixels == 9216  # type: ignore[attr-defined]

    config = run_vision_config("gemma3")
    form = model_images(config, tmp_path)
    form.processor.image_mean = [0.1, 0.2, 0.3]
    made = make_processor("gemma3", form, make_tokenizer("gemma3"))
    made.save_pretrained(tmp_path / "made")  # as the installed transformers does
    found = model_images(config, tmp_path / "made", pretrained=True)
    assert list(found.processor.image_mean) == [0.1, 0.2, 0.3]
    (tmp_path / "processor_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"processor_config.json cannot be read"):
        model_images(config, tmp_path)


def test_settings_go_along_with_the_trained_model(tmp_path: Path) -> None:
    start, made = tmp_path / "start", tmp_path / "model"
    start.mkdir()
    names = ["generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
    for name in (*names, "weights"):
        (start / name).write_text(name)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        save_pretrained(tiny_model(), made, None, start=start)
    finally:
        dist.destroy_process_group()
    assert [(made / name).read_text() for name in names] == names
    assert not (made / "weights").exists()
    assert json.loads((made / "config.json").read_text())["model_type"] == "qwen3"
