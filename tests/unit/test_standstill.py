"""A run in which nothing moves says so, with the last words of the ranks that are silent for longest."""

from __future__ import annotations

import queue
import time

import pytest

from flexcp.runtime import standstill
from flexcp.runtime.standstill import StandstillNotice
from flexcp.runtime.status import leave_word, tell

WAIT_S = 20.0


@pytest.fixture
def notices(monkeypatch, tmp_path):
    """What a notice says that looks often and is soon impatient; rank 1 was silent long before this one."""
    monkeypatch.setattr(standstill, "_PERIOD_S", 0.02)
    monkeypatch.setattr(standstill, "_FIRST_S", 0.3)
    leave_word(tmp_path, 1)
    tell("task 1 of 4 on ranks [1]", 5, ["file-3.txt"])
    leave_word(tmp_path, 0)
    told = queue.Queue()
    looking = StandstillNotice(told.put, 2)
    yield told
    looking.close()


def test_silence_is_told_again_when_it_has_doubled(notices):
    begun_s = time.monotonic()
    first, first_s = notices.get(timeout=WAIT_S), time.monotonic() - begun_s
    second, second_s = notices.get(timeout=WAIT_S), time.monotonic() - begun_s
    head, one, other = first.splitlines()
    assert head.startswith("nothing has moved here for ")
    assert one.startswith("rank 1 on ")
    assert one.endswith("in step 5, task 1 of 4 on ranks [1] (samples file-3.txt)")
    assert other.startswith("rank 0 on ")
    assert second.startswith("nothing has moved here for ")
    assert second_s > 1.5 * first_s


def test_who_moves_is_not_disturbed_and_a_new_silence_is_told_anew(notices):
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        tell("task 2 of 4 on ranks [0]", 5)
        time.sleep(0.02)
    assert notices.empty()
    assert "task 2 of 4 on ranks [0]" in notices.get(timeout=WAIT_S)


def test_an_old_word_of_a_run_before_is_no_standstill(monkeypatch, tmp_path):
    """The silence counts from when the run began."""
    monkeypatch.setattr(standstill, "_PERIOD_S", 0.02)
    leave_word(tmp_path, 0)
    now_s = time.time()
    monkeypatch.setattr("flexcp.runtime.status.time.time", lambda: now_s + 3600)
    told = queue.Queue()
    looking = StandstillNotice(told.put, 1)
    time.sleep(0.2)
    looking.close()
    assert told.empty()
