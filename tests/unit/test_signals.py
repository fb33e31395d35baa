"""SIGTERM is a request while a run trains, and what it was before when the run is over."""

from __future__ import annotations

import os
import signal

from flexcp.runtime.signals import StopOnSignal


def test_sigterm_is_heard_and_ends_nothing() -> None:
    heard_outside: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard_outside.append(number))
    try:
        with StopOnSignal() as stop:
            asked_at_first = stop.asked()
            os.kill(os.getpid(), signal.SIGTERM)
            asked = stop.asked()
        heard_inside = list(heard_outside)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert (asked_at_first, asked, heard_inside) == (False, True, [])
    assert heard_outside == [signal.SIGTERM]


def test_who_was_told_to_end_is_not_killed_on_its_way_out() -> None:
    """By somebody who says it twice; who was not told can be."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with StopOnSignal():
            pass
        untold = signal.getsignal(signal.SIGTERM)
        with StopOnSignal() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
        told = signal.getsignal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert untold == signal.SIG_DFL
    assert told == stop._hear
