"""What the sections of the check share: where they run and how large, a row of the table, a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where the check runs; `quick` is the form that a CPU does in a minute."""

    device: torch.device
    quick: bool

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok` is None for a number that is reported and not judged."""

    name: str
    value: str
    ok: bool | None = None


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median wall time, after one run to warm up."""
    work()
    times = []
    for _ in range(repeats):
        synchronize(device)
        begun_s = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def judged(name: str, error: float, bound: float) -> Row:
    """A difference beside its bound; NaN passes none."""
    return Row(name, f"{error:.1e} (bound {bound:.0e})", error <= bound)
