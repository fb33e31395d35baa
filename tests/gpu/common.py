"""What the sections of the check share: where they run and how large, a row of the table, a time."""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
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
    """One line of the table, and a trace for the log. `ok` is None for what is reported and not judged."""

    name: str
    value: str
    ok: bool | None = None
    trace: str = ""


def attempt(name: str, work: Callable[[], Iterable[Row]]) -> list[Row]:
    """The rows of a part; one that says why where it raises, so that all other parts run."""
    try:
        return list(work())
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:90]
        return [Row(name, text, ok=False, trace=traceback.format_exc())]


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


def release(device: torch.device) -> None:
    """Give back what nothing holds any more: ranks that share the device come next."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def too_late(name: str) -> Row:
    """For what was left out."""
    return Row(name, "not begun: the time is up", ok=False)


def judged(name: str, error: float, bound: float) -> Row:
    """A difference beside its bound; NaN passes none."""
    return Row(name, f"{error:.1e} (bound {bound:.0e})", error <= bound)
