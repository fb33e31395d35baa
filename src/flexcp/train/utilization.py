"""Model FLOPs utilization: how much of what the ranks could compute at their peak the model got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from flexcp.core.errors import ConfigError
from flexcp.core.metrics import StepReport
from flexcp.core.model_shape import ModelShape
from flexcp.cost.calibration import hardware_at, is_calibration
from flexcp.cost.flops import model_flops
from flexcp.cost.presets import hardware
from flexcp.runtime.collectives import all_gather_rows, collective_device
from flexcp.train.config import ParallelSection


def peak_flops_per_s(section: ParallelSection, *, cpu: bool, speed: float) -> float | None:
    """Peak of one rank.

    Args:
        section: names the hardware, and perhaps its peak.
        cpu: whether ranks run on CPU cores.
        speed: cores of one rank there, else 1.

    Returns:
        None where nobody knows: a calibration holds what was reached, not what could be.
    """
    if section.peak_flops_per_s is not None:
        return section.peak_flops_per_s
    if is_calibration(section.hardware):
        return speed * hardware("cpu").flops_per_s if cpu else None
    return speed * hardware_at(section.hardware).flops_per_s


def slowest(report: StepReport) -> StepReport:
    """With the times of the rank that took longest, so that all ranks judge alike; all call it."""
    mine = torch.tensor([report.step_s, report.optimizer_s], dtype=torch.float64, device=collective_device())
    step_s, optimizer_s = all_gather_rows(mine, "the times of a step").amax(dim=0).tolist()
    return replace(report, step_s=step_s, optimizer_s=optimizer_s)


class Utilization:
    """Puts the MFU into the reports of steps, and sees that it is possible.

    Args:
        shape: of the model.
        peak: FLOP/s of one rank; None leaves reports as they are.
        ranks: how many there are.
        hardware: its name, for messages.
        cpu: whether ranks run on CPU cores; there the peak is only that of one kind of core.
        notice: told once of an MFU above 1 on CPU.
    """

    def __init__(
        self,
        shape: ModelShape,
        peak: float | None,
        ranks: int,
        hardware: str,
        *,
        cpu: bool,
        notice: Callable[[str], object],
    ) -> None:
        self._shape, self._peak, self._ranks, self._hardware = shape, peak, ranks, hardware
        self._cpu, self._notice = cpu, notice
        self._noticed = False

    def measure(self, report: StepReport) -> StepReport:
        """The report with its MFU.

        Raises:
            ConfigError: it is above 1 on an accelerator, so the hardware is not what it is said to be.
        """
        if self._peak is None:
            return report
        flops = model_flops(self._shape, report.tokens, report.pairs)
        mfu = flops / (report.step_s * self._peak * self._ranks)
        if mfu > 1.0:
            self._doubt(report.step, mfu)
        return replace(report, mfu=mfu)

    def _doubt(self, step: int, mfu: float) -> None:
        cause = (
            f"step {step} came to {mfu:.0%} of the peak of {self._ranks} ranks of {self._hardware} "
            f"({self._peak:.3g} FLOP/s each)"
        )
        if not self._cpu:
            raise ConfigError(
                f"{cause}: the ranks run on something else",
                "Name it in parallel.hardware (plans are made for that machine), or give its peak in "
                "parallel.peak_flops_per_s.",
            )
        if not self._noticed:
            self._noticed = True
            self._notice(
                f"{cause}. These cores are faster than those of the preset: MFU is only good for comparing "
                "steps, until parallel.peak_flops_per_s says their peak."
            )
