"""A run in which nothing moves says so, with the last words of the ranks that are silent for longest."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexcp.runtime import standstill, status
from flexcp.runtime.standstill import StandstillNotice
from flexcp.runtime.status import leave_word, own_silence, tell

WAIT_S = 20.0


def told_of(monkeypatch: pytest.MonkeyPatch, *looks: tuple[float, float]) -> list[str]:
    """What is told at looks at (seconds since the beginning, seconds of silence)."""
    coming = iter([(0.0, 0.0), *looks])
    now = next(coming)

    def silence() -> tuple[Path, float] | None:
        nonlocal now
        now = next(coming, (0.0, -1.0))
        return None if now[1] < 0 else (Path(), now[1])

    monkeypatch.setattr(standstill, "_PERIOD_S", 0.0)
    monkeypatch.setattr(standstill, "own_silence", silence)
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: now[0]))
    told: list[str] = []
    looking = StandstillNotice(told.append, 0)
    looking._thread.join(WAIT_S)
    looking.close()
    return [text.splitlines()[0].partition(";")[0] for text in told]


def after(*silences_s: float) -> list[tuple[float, float]]:
    """Looks long after the beginning."""
    return [(1e6, silence_s) for silence_s in silences_s]


def test_silence_is_told_when_it_is_long_and_whenever_it_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = told_of(monkeypatch, *after(5, 29, 31, 40, 61, 63, 120, 130, 255, 261))

    assert texts == [f"nothing has moved here for {s} s" for s in (31, 63, 130, 261)]


def test_who_moves_is_not_disturbed_and_a_new_silence_is_told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = told_of(monkeypatch, *after(4, 9, 2, 29, 1, 35, 40, 3, 29, 30, 45))

    assert texts == ["nothing has moved here for 35 s", "nothing has moved here for 30 s"]


def test_silence_counts_from_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word before may be old: data was indexed meanwhile."""
    texts = told_of(monkeypatch, (5, 3605), (29, 3629), (30, 3630), (61, 3661))

    assert texts == ["nothing has moved here for 30 s", "nothing has moved here for 61 s"]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[queue.Queue[str]]:
    """What a notice of two ranks says that looks often and is soon impatient."""
    monkeypatch.setattr(standstill, "_PERIOD_S", 0.02)
    monkeypatch.setattr(standstill, "_FIRST_S", 0.3)
    leave_word(tmp_path, 1)
    tell("task 1 of 4 on ranks [1]", 5, ["file-3.txt"])
    leave_word(tmp_path, 0)
    texts: queue.Queue[str] = queue.Queue()
    looking = StandstillNotice(texts.put, 2)
    yield texts
    looking.close()


def test_the_ranks_that_are_silent_for_longest_are_told(told: queue.Queue[str]) -> None:
    """By a thread, with what they were doing."""
    head, first, second = told.get(timeout=WAIT_S).splitlines()

    assert head.startswith("nothing has moved here for ")
    assert head.endswith(" s; silent for longest:")
    assert first.startswith("rank 1 on ")
    assert " in step 5, task 1 of 4 on ranks [1] (samples file-3.txt)" in first
    assert second.startswith("rank 0 on ")


def test_a_clock_that_is_set_moves_no_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that slept, or whose clock was an hour behind, has stood still for nobody."""
    clock: Any = SimpleNamespace(wall_s=1e9, own_s=50.0)
    fake = SimpleNamespace(time=lambda: clock.wall_s, monotonic=lambda: clock.own_s)
    monkeypatch.setattr(status, "time", fake)
    leave_word(tmp_path, 0)
    clock.wall_s += 3600

    assert own_silence() == (tmp_path, 0.0)
    clock.own_s += 40
    assert own_silence() == (tmp_path, 40.0)
