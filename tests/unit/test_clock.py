"""Times of work on a device that the host runs ahead of: read late, off events."""

from __future__ import annotations

import time

import pytest
import torch

from flexcp.runtime.clock import Clock


class Queue:
    """A device that is passed by hand: events get the time at which it comes to them."""

    now_ms = 0.0
    recorded: list[Event]


class Event:
    """What `torch.Event` of an accelerator does."""

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None

    def record(self) -> None:
        Queue.recorded.append(self)

    def synchronize(self) -> None:
        assert self.at_ms is not None, "the host would wait here"

    def elapsed_time(self, other: Event) -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


def test_marks_on_an_accelerator_are_read_when_the_device_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Marking never waits; seconds are those of the device, on the host's clock."""
    Queue.recorded = []
    monkeypatch.setattr(torch, "Event", Event)
    before_s = time.perf_counter()
    clock = Clock(torch.device("cuda", 0))
    after_s = time.perf_counter()
    marks = [clock.mark() for _ in range(2)]
    assert not clock.is_immediate
    for event, at_ms in zip(Queue.recorded, (5.0, 1005.0, 3505.0), strict=True):
        event.at_ms = at_ms

    begun_s, ended_s = (clock.read_s(mark) for mark in marks)
    assert ended_s - begun_s == pytest.approx(2.5)
    assert before_s + 1.0 <= begun_s <= after_s + 1.0


def test_marks_on_a_cpu_are_times() -> None:
    clock = Clock(torch.device("cpu"))
    before_s = time.perf_counter()
    mark = clock.mark()
    assert clock.is_immediate
    assert before_s <= clock.read_s(mark) <= time.perf_counter()
