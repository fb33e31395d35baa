"""Processes that somebody has stopped: whoever waits for one cannot tell it from one that works for long."""

from __future__ import annotations

from pathlib import Path

STOPPED_S = 15.0  # a process that somebody stopped may go on for so long


def is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal; never so where the system has no /proc to say it."""
    try:
        # The name of the program comes before the state, in brackets, and may hold any.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
