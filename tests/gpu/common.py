"""What the sections of the check share: where they run and how large, a row of the table, a time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Where the check runs; `quick` is the form that a CPU does in a minute.

    Attributes:
        ends_s: nothing begins later, on `time.monotonic`.
    """

    device: torch.device
    quick: bool
    ends_s: float = math.inf

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def left_s(self) -> float:
        """0 when the time is up."""
        return max(0.0, self.ends_s - time.monotonic())

    def within(self, most_s: float) -> float:
        """Of a world of ranks that is started now; one of 0 would not be said to have been late."""
        return max(1.0, min(most_s, self.left_s))


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


def too_late(name: str) -> Row:
    """For what was left out."""
    return Row(name, "not begun: the time is up", ok=False)


def judged(name: str, error: float, bound: float) -> Row:
    """A difference beside its bound; NaN passes none."""
    return Row(name, f"{error:.1e} (bound {bound:.0e})", error <= bound)
