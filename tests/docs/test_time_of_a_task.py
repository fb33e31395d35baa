"""The example worked by hand in docs/time_of_a_task.md is what the library computes."""

import re
from pathlib import Path

import pytest

from flexcp.core.sample import Sample
from flexcp.cost import CostModel, Link, Load

PAGE = (Path(__file__).parents[2] / "docs" / "time_of_a_task.md").read_text(encoding="utf-8")


def test_task_by_hand():
    names = ("pair_s", "token_s", "sample_s", "pack_s", "ring_step_s")
    values = {name: float(re.search(rf"`{name}` = ([\d.e-]+)", PAGE)[1]) for name in names}
    link = Link(bytes_per_s=2e9, latency_s=0.0)
    cost = CostModel(**values, kv_bytes_per_token=6144.0, layers=4, intra=link, inter=link)
    load = Load.of(Sample(0, 1000, spans=((300, 500),)), 0) + Load.of(Sample(1, 500), 0)

    assert f"{load.pairs:,} pairs" in PAGE
    shown = float(re.search(r"\*\*task\*\* \| \| \*\*([\d.]+)\*\*", PAGE)[1])
    assert cost.task_s(load, 2) == pytest.approx(shown, rel=1e-12)
    tokens, moved, rate, seconds = re.search(r"(\d+) · (\d+) / ([\de]+) = ([\d.]+) s\.", PAGE).groups()
    assert (int(tokens), float(moved), float(rate)) == (750, cost.kv_bytes_per_token, link.bytes_per_s)
    assert int(tokens) * float(moved) / float(rate) == pytest.approx(float(seconds), abs=5e-5)
    assert float(seconds) < cost.pair_s * load.pairs / 2  # so they hide behind attention, as the page says
