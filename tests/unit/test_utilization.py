"""Model FLOPs utilization: what is counted, against which peak, and what is impossible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.test_calibration import SETUP, tasks
from tests.unit.test_outputs import report

from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import ModelShape
from flexcp.cost.calibration import fit_calibration
from flexcp.cost.presets import hardware
from flexcp.train import utilization as module
from flexcp.train.config import ParallelSection
from flexcp.train.utilization import Utilization, peak_flops_per_s, slowest

TINY = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
STEP = replace(report(7, 1.0), mfu=None, tokens=2000, pairs=1_000_000, step_s=2.0)
FLOPS = 2000 * 336 + 1_000_000 * 24  # 6 a weight and token; 12 a pair and channel of the heads


def utilization(peak: float | None, cpu: bool, told: list[str]) -> Utilization:
    return Utilization(TINY, peak, 4, "h100", cpu=cpu, notice=told.append)


def test_mfu_is_of_all_ranks_and_of_the_pairs_attended() -> None:
    """Four ranks, two seconds, a tenth of the peak."""
    told: list[str] = []
    peak = 10 * FLOPS / (4 * 2.0)

    assert utilization(peak, False, told).measure(STEP) == replace(STEP, mfu=pytest.approx(0.1))
    assert utilization(peak, False, told).measure(replace(STEP, pairs=0)).mfu == pytest.approx(
        0.1 * 2000 * 336 / FLOPS
    )
    assert utilization(None, False, told).measure(STEP) is STEP
    assert told == []


def test_more_than_the_peak_is_an_error_on_accelerators() -> None:
    """D47, D62: what is faster than the hardware has not been computed."""
    peak = FLOPS / (4 * 2.0)
    assert utilization(peak, False, []).measure(STEP).mfu == 1.0
    with pytest.raises(ConfigError) as caught:
        utilization(peak / 1.5, False, []).measure(STEP)

    assert "step 7 came to 150% of the peak of 4 ranks of h100" in caught.value.cause
    assert "run on something else" in caught.value.cause
    assert "parallel.hardware" in caught.value.remedy


def test_more_than_the_peak_is_a_notice_on_cpu() -> None:
    """The peak of the preset is that of one kind of core; said once."""
    told: list[str] = []
    measured = utilization(FLOPS / (4 * 2.0) / 1.5, True, told)

    assert measured.measure(STEP).mfu == measured.measure(STEP).mfu == pytest.approx(1.5)
    assert len(told) == 1
    assert "faster than those of the preset" in told[0]


def test_the_peak_is_the_presets_or_what_the_user_says(tmp_path: Path) -> None:
    """A calibration holds rates that were reached: no peak, but on CPU that of the preset's core."""
    machine = tmp_path / "machine.json"
    machine.write_text(fit_calibration(tasks(), SETUP).to_json())

    assert peak_flops_per_s(ParallelSection(hardware="h100"), cpu=False, speed=1.0) == 989e12
    assert peak_flops_per_s(ParallelSection(), cpu=True, speed=0.5) == hardware("cpu").flops_per_s / 2
    profiled = ParallelSection(hardware=str(machine))
    assert peak_flops_per_s(profiled, cpu=False, speed=1.0) is None
    assert peak_flops_per_s(profiled, cpu=True, speed=2.0) == 2 * hardware("cpu").flops_per_s
    said = ParallelSection(hardware=str(machine), peak_flops_per_s=5e14)
    assert peak_flops_per_s(said, cpu=False, speed=1.0) == 5e14


def test_the_time_that_is_judged_is_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one rank alone would be above its peak, and end alone."""
    gathered = torch.tensor([[2.0, 0.5], [3.0, 0.25]], dtype=torch.float64)
    monkeypatch.setattr(module, "collective_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(module, "all_gather_rows", lambda mine, what: gathered)

    assert slowest(replace(STEP, optimizer_s=0.5)) == replace(STEP, step_s=3.0, optimizer_s=0.5)
