"""When work begins and ends: read off the clock on a CPU, off events in the queue of an accelerator.

There the host runs ahead of its device, and to wait for it after each task would leave the device idle.
"""

from __future__ import annotations

import time

import torch

Mark = float | torch.Event


class Clock:
    """Marks in the work of one step, and the seconds at which the device passed them (`time.perf_counter`).

    Made when the device has little left to do: what it then still has to do is not seen.

    Attributes:
        is_immediate: marks can be read at once; else when the device is known to have passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_immediate = device.type == "cpu"
        self._first = self.mark()
        self._first_s = time.perf_counter()

    def mark(self) -> Mark:
        """Here and now in the work; never waits."""
        if self.is_immediate:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def read_s(self, mark: Mark) -> float:
        """Seconds; waits for the device if it has not come so far."""
        if isinstance(mark, float) or isinstance(self._first, float):
            return float(mark)  # type: ignore[arg-type]
        mark.synchronize()
        return self._first_s + self._first.elapsed_time(mark) / 1e3
