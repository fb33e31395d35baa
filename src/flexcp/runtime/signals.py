"""SIGTERM as a request: a run that is told to end finishes its step, saves, and ends as if it were done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopOnSignal:
    """Inside `with`, SIGTERM ends nothing and is remembered. Only the main thread can listen.

    Afterwards it is what it was; only that it would kill a process which was told to end, and is ending, does
    not come back.
    """

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def asked(self) -> bool:
        """Whether this rank has been told to end."""
        return self._asked

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        would_kill = self._asked and self._before == signal.SIG_DFL
        if self._before is not None and not would_kill:
            signal.signal(signal.SIGTERM, self._before)
