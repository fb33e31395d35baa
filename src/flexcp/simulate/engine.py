"""The event loop: simulated time, and what is due when. It knows nothing of ranks or plans."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Event:
    """An action that is due at some time, unless it is cancelled before."""

    __slots__ = ("_action",)

    def __init__(self, action: Action) -> None:
        self._action: Action | None = action

    def cancel(self) -> None:
        """Make it never happen."""
        self._action = None

    def happen(self) -> None:
        """Act, unless cancelled."""
        if self._action is not None:
            self._action()


class Clock:
    """Simulated seconds from 0; events that are due at the same time happen in the order they were made.

    >>> clock, seen = Clock(), []
    >>> _ = clock.at(2.0, lambda: seen.append("second"))
    >>> _ = clock.at(1.0, lambda: seen.append(clock.at(2.0, lambda: seen.append("third")) and "first"))
    >>> clock.run(); seen, clock.now_s
    (['first', 'second', 'third'], 2.0)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Event]] = []
        self._made = 0

    def at(self, time_s: float, action: Action) -> Event:
        """Let something happen later, or now after what else is due now."""
        event = Event(action)
        heappush(self._due, (time_s, self._made, event))
        self._made += 1
        return event

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing is due, or time is up: what is due at `until_s` is the last to happen."""
        while self._due:
            if self._due[0][0] > until_s:
                self.now_s = until_s
                return
            self.now_s, _, event = heappop(self._due)
            event.happen()
