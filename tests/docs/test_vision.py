"""The Python of docs/vision.md: what can run without ranks runs, in order; the loop compiles."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import flexcp

PAGE = (Path(__file__).parents[2] / "docs" / "vision.md").read_text(encoding="utf-8")
LOOP, SIZES, DATA = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


def test_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    Path("preprocessor_config.json").write_text(json.dumps(settings))
    shape, hardware = flexcp.model_shape("qwen3-vl-8b"), flexcp.hardware("h100")
    names = {"flexcp": flexcp, "json": json, "Path": Path, "shape": shape, "hardware": hardware}

    exec(SIZES, names)
    exec(DATA, names)

    rows = names["rows"]
    assert rows == flexcp.images.RowsOfImages(2392, ((12, 2052),), (8160,))
    pictures = type("Three", (names["Pictures"],), {"rows": lambda self, index: rows})()
    sample = pictures.sample(3)
    assert (sample.id, sample.tokens, sample.spans) == (3, 2392, ())
    assert sample.encoder_pairs > 0
    assert compile(LOOP, "loop", "exec")
