"""Processes that somebody has stopped: whoever waits for one cannot tell it from one that works for long."""

from __future__ import annotations

from pathlib import Path

STOPPED_S = 15.0  # a process that somebody stopped may go on for so long


class StoppedWatch:
    """Counts for how long one process has been stopped, look by look.

    Attributes:
        too_long: it was so for `STOPPED_S`; stays true, though the process may go on.
        words: what is to be said then, behind the name of the process.
    """

    def __init__(self) -> None:
        self.too_long = False
        self.words = f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s"
        self._stopped_s = 0.0

    def look(self, pid: int | None, passed_s: float) -> bool:
        """Look again, `passed_s` after the last time; returns `too_long`."""
        if not self.too_long:
            self._stopped_s = self._stopped_s + passed_s if _is_stopped(pid) else 0.0
            self.too_long = self._stopped_s >= STOPPED_S
        return self.too_long


def _is_stopped(pid: int | None) -> bool:
    """Whether a process is stopped by a signal; never so where the system has no /proc to say it."""
    try:
        # The name of the program comes before the state, in brackets, and may hold any.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
