"""Text with images from disk: lengths from headers, what a sample holds, and rows that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from tests.vision_models import FAMILIES, run_vision_config

from flexcp.core.errors import ConfigError, DataError
from flexcp.train.data import ByteTokenizer, open_documents
from flexcp.train.data.pictures import PictureDataset, PictureRows, open_picture_index
from flexcp.train.images import model_images

SIZES = [(33, 70), (64, 64), (150, 31)]
ROWS = [
    {"text": "a <image> b<image>", "images": ["0.png", "1.png"]},
    {"text": "no image", "images": []},
    {"text": "<image>", "images": ["2.png"]},
    {"text": None, "images": None},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, (height, width) in enumerate(SIZES):
        Image.new("RGB", (width, height), (40 * number, 9, 200)).save(tmp_path / f"{number}.png")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def opened(path: Path, family: str = "qwen3_vl", column: str = "images") -> PictureDataset:
    base = path if path.is_dir() else path.parent
    rows = PictureRows(open_documents(path), column, base)
    form = model_images(run_vision_config(family), base)
    index = open_picture_index(rows, ByteTokenizer(), form, base / ".flexcp", lambda *_: None)
    return PictureDataset(rows, ByteTokenizer(), form, index, max_tokens=None, too_long="error", remedy="")


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_as_long_as_their_headers_say(family: str, folder: Path) -> None:
    """And what is decoded later fits the model: as many image tokens as features."""
    from flexcp.integrations.transformers.encoders import family_of, runs

    data = opened(folder / "rows.jsonl", family)
    config = run_vision_config(family)
    rule: Any = family_of(config)
    assert len(data) == 3
    assert [str(note) for note in data.skipped] == ["1 skipped, not text: rows.jsonl:4"]
    for index in range(3):
        example, rows = data[index], data.rows(index)
        assert rows.tokens == data.lengths[index] == len(example["input_ids"]) == len(example["labels"])
        is_image = example["input_ids"] == config.image_token_id
        assert runs(is_image) == rows.spans
        assert (example["labels"][is_image] == -100).all()
        images = rule.images(example)
        assert sum(images.units if images else ()) == is_image.sum()
        assert len(rows.patches) == len(images.units if images else ())
    labels = [label for label in data[0]["labels"].tolist() if label >= 0]
    margin = "\n\n" if family == "gemma3" else ""  # text, on both sides of an image
    assert bytes(labels[:-1]).decode() == f"a {margin}{margin} b{margin}{margin}"
    assert labels[-1] == ByteTokenizer.eos_id


def test_an_index_is_built_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(folder / "rows.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(PictureRows, "sizes", lambda *_: pytest.fail("an image was opened"))
        again = opened(folder / "rows.jsonl")
    assert again.lengths.tolist() == first.lengths.tolist()
    assert [again.rows(i) for i in range(3)] == [first.rows(i) for i in range(3)]
    settings = {"size": {"shortest_edge": 256, "longest_edge": 16_384}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert opened(folder / "rows.jsonl").lengths[0] < first.lengths[0]  # other settings, another index
    for file in (folder / ".flexcp").glob("*.npz"):
        file.write_bytes(b"no index")
    with pytest.raises(DataError, match=r"the length index .* is damaged"):
        opened(folder / "rows.jsonl")


def test_parquet_gives_the_same_samples(folder: Path) -> None:
    """Paths, bytes, and the objects that Hugging Face writes."""
    expected = opened(folder / "rows.jsonl")
    texts = [row["text"] for row in ROWS]
    data = [[(folder / name).read_bytes() for name in row["images"] or ()] for row in ROWS]
    for number, images in enumerate(
        (
            [row["images"] for row in ROWS],
            data,
            [[{"bytes": content, "path": None} for content in row] for row in data],
        )
    ):
        path = folder / f"{number}.parquet"
        pa.parquet.write_table(pa.table({"text": texts, "images": images}), path)
        got = opened(path)
        assert got.lengths.tolist() == expected.lengths.tolist()
        for index in range(3):
            for key, value in expected[index].items():
                assert np.array_equal(got[index][key], value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "<image>", "images": []}, "rows.jsonl:1 has 1 times <image> in its text, and 0 images"),
        ({"text": "<image>", "images": "gone.png"}, "gone.png is not a readable image (FileNotFoundError)"),
        ({"text": "<image>", "images": "rows.jsonl"}, "is not a readable image (UnidentifiedImageError)"),
        ({"text": "<image>", "images": 7}, "rows.jsonl:1 holds a int where an image belongs"),
        ({"text": "no"}, "rows.jsonl:1 has no key 'images'; it has: text"),
    ],
)
def test_rows_that_do_not_fit_are_named(row: dict[str, Any], words: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError) as caught:
        opened(folder / "rows.jsonl")
    assert words in caught.value.cause


def test_an_image_that_changed_is_named(folder: Path) -> None:
    data = opened(folder / "rows.jsonl")
    Image.new("RGB", (500, 500)).save(folder / "2.png")
    with pytest.raises(DataError, match=r"rows.jsonl:3 had \d+ tokens in the length index and now has \d+"):
        data[2]


def test_what_is_no_data_with_images_is_refused(folder: Path) -> None:
    (folder / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data with images is \.jsonl or \.parquet"):
        opened(folder / "a.txt")
    text = run_vision_config("qwen3_vl").text_config
    with pytest.raises(ConfigError, match="models of type 'qwen3_vl_text' see no images"):
        model_images(text, folder)
    (folder / "preprocessor_config.json").write_text('{"do_pan_and_scan": true}')
    with pytest.raises(ConfigError, match="settings ask for do_pan_and_scan"):
        model_images(run_vision_config("gemma3"), folder)


def test_images_stand_as_cameras_held_them(folder: Path) -> None:
    """EXIF says so beside the pixels; the header's size counts turned as well."""
    lying = Image.new("RGB", (90, 40), (9, 9, 9))
    lying.paste((250, 250, 250), (0, 0, 45, 40))
    upright = lying.transpose(Image.Transpose.ROTATE_270)
    exif = Image.Exif()
    exif[0x0112] = 6
    lying.save(folder / "lying.png", exif=exif)
    upright.save(folder / "upright.png")
    rows = [{"text": "<image>", "images": [name]} for name in ("lying.png", "upright.png")]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first, second = (opened(folder / "rows.jsonl")[index] for index in range(2))

    assert first["image_grid_thw"].tolist() == second["image_grid_thw"].tolist()
    np.testing.assert_array_equal(first["pixel_values"], second["pixel_values"])


def test_images_of_more_than_8_bits_are_named(folder: Path) -> None:
    """Clipped to 8 bits they would be white."""
    Image.fromarray(np.full((64, 64), 20_000, dtype=np.uint16)).save(folder / "deep.png")
    (folder / "rows.jsonl").write_text(json.dumps({"text": "<image>", "images": ["deep.png"]}))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*deep.png has pixels of mode I;16, not of 8 bits"):
        opened(folder / "rows.jsonl")


def test_an_image_that_no_model_takes_is_named_by_its_row(folder: Path) -> None:
    Image.new("RGB", (4000, 2)).save(folder / "long.png")
    (folder / "rows.jsonl").write_text(json.dumps({"text": "<image>", "images": ["long.png"]}))
    with pytest.raises(DataError, match=r"^rows.jsonl:1: an image has 2 x 4000 pixels"):
        opened(folder / "rows.jsonl")
