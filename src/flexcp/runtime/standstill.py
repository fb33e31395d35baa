"""Says what ranks are doing when nothing moves: long before a timeout ends the run, and whatever waits.

A long task stands as still as a stalled one, so this only tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flexcp.runtime.status import last_words, own_silence

_PERIOD_S = 5.0
_FIRST_S = 30.0
_SHOWN = 3


class StandstillNotice:
    """A thread of one rank that looks at its own last word; at those of the others only when it is old.

    Args:
        notify: given the text; when the silence is 30 s long, and whenever it has doubled.
        size: number of ranks.
    """

    def __init__(self, notify: Callable[[str], object], size: int) -> None:
        self._notify, self._size, self._begun_s = notify, size, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="flexcp-standstill", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        due_s = _FIRST_S
        while not self._ended.wait(_PERIOD_S):
            silence = own_silence()
            if silence is None:
                return
            folder, silence_s = silence[0], min(silence[1], time.monotonic() - self._begun_s)
            if silence_s < _FIRST_S:
                due_s = _FIRST_S
            elif silence_s >= due_s:
                due_s = 2 * silence_s
                words = last_words(folder, self._size, most=_SHOWN)
                self._notify(f"nothing has moved here for {silence_s:.0f} s; silent for longest:\n{words}")

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
