"""The tasks of one step on the clock: a task starts when the ranks of its group are free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import PlanError
from flexcp.core.plan import Plan
from flexcp.simulate.engine import Clock, Event
from flexcp.simulate.sharing import Sharing

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """When tasks ran, in seconds from the opening of the step; infinite if never reached.

    Attributes:
        start_s, end_s: of every task.
        gathers: (from, to) of what every wave waited for its collectives after its last task.
    """

    start_s: Array
    end_s: Array
    gathers: tuple[tuple[float, float], ...] = ()

    @property
    def gathered_s(self) -> float:
        """All `gathers` together."""
        return sum(to_s - from_s for from_s, to_s in self.gathers)

    @property
    def closed_s(self) -> float:
        """When tasks and collectives are over."""
        return max(float(self.end_s.max()), *(to_s for _, to_s in self.gathers), 0.0)

    @property
    def tasks_s(self) -> float:
        """What tasks alone took: until all is over, without `gathers`."""
        return self.closed_s - self.gathered_s


def run_tasks(
    plan: Plan,
    seconds: list[float],
    sharing: Sharing | None = None,
    until_s: float = math.inf,
    collectives: WaveCollectives | None = None,
) -> TaskTimes:
    """Run a step.

    Free-running: every rank takes its tasks in the order of the plan. Lockstep: besides, a wave begins when
    the one before has ended on all ranks.

    Args:
        plan: the step.
        seconds: of each task; with `sharing`, what they are when it shares nothing.
        sharing: what running tasks take from each other.
        until_s: stop here.
        collectives: of every wave of a plan in lockstep.

    Raises:
        PlanError: tasks wait for each other in a circle, which no checked plan does.
    """
    run = _TaskRun(plan, seconds, sharing, collectives or WaveCollectives())
    run.clock.run(until_s)
    if run.clock.now_s < until_s and math.inf in run.start_s:
        stuck = run.start_s.index(math.inf)
        raise PlanError([f"task {stuck} on ranks {list(plan.tasks[stuck].ranks)} waits in a circle"])
    return TaskTimes(np.array(run.start_s), np.array(run.end_s), tuple(run.gathers))


@dataclass(frozen=True, slots=True)
class WaveCollectives:
    """What all ranks exchange in every wave: for `seconds`, after its tasks or, if `hidden`, beside them."""

    seconds: float = 0.0
    hidden: bool = False

    def closed_s(self, opened_s: float, ended_s: float) -> float:
        """When a wave is over."""
        return max(ended_s, opened_s + self.seconds) if self.hidden else ended_s + self.seconds


@dataclass(slots=True)
class _Work:
    """A running task whose pace can change: the part left at `since_s`, and what the whole would take."""

    left: float
    since_s: float
    seconds: float
    end: Event


class _TaskRun:
    """One step under way."""

    def __init__(
        self, plan: Plan, seconds: list[float], sharing: Sharing | None, collectives: WaveCollectives
    ) -> None:
        self.gathers: list[tuple[float, float]] = []
        self._collectives, self._opened_s = collectives, 0.0
        self.clock = Clock()
        self.start_s = [math.inf] * len(seconds)
        self.end_s = [math.inf] * len(seconds)
        self._seconds, self._sharing = seconds, sharing
        self._ranks = [task.ranks for task in plan.tasks]
        self._absent = [len(ranks) for ranks in self._ranks]  # members that are not yet free
        self._lists = {
            rank: iter(plan.tasks_of(rank)) for rank in sorted({r for g in self._ranks for r in g})
        }
        self._work: dict[int, _Work] = {}
        self._waves = _Waves(plan) if plan.mode == "lockstep" else None
        self.clock.at(0.0, self._open)

    def _open(self) -> None:
        for rank in self._lists:
            self._free(rank)

    def _free(self, rank: int) -> None:
        """A rank joins the group of its next task; the last one to join starts it."""
        index = next(self._lists[rank], None)
        if index is None:
            return
        self._absent[index] -= 1
        if not self._absent[index] and (self._waves is None or self._waves.may_start(index)):
            self._start(index)

    def _start(self, index: int) -> None:
        now_s = self.start_s[index] = self.clock.now_s
        end = self.clock.at(now_s + self._seconds[index], partial(self._end, index))
        if self._sharing is not None:
            self._work[index] = _Work(1.0, now_s, self._seconds[index], end)
            self._repace(self._sharing, self._sharing.enter(index))

    def _end(self, index: int) -> None:
        self.end_s[index] = self.clock.now_s
        if self._sharing is not None:
            del self._work[index]
            self._repace(self._sharing, self._sharing.leave(index))
        for rank in self._ranks[index]:
            self._free(rank)
        if self._waves is not None and self._waves.ended(index):
            now_s = self.clock.now_s
            closed_s = self._collectives.closed_s(self._opened_s, now_s)
            if closed_s > now_s:
                self.gathers.append((now_s, closed_s))
                self.clock.at(closed_s, partial(self._open_wave, self._waves))
            else:
                self._open_wave(self._waves)

    def _open_wave(self, waves: _Waves) -> None:
        self._opened_s = self.clock.now_s
        for ready in waves.open_next():
            self._start(ready)

    def _repace(self, sharing: Sharing, indices: tuple[int, ...]) -> None:
        """What is left of running tasks goes on at the shares of this moment."""
        now_s = self.clock.now_s
        for index in indices:
            work, seconds = self._work[index], sharing.seconds(index)
            if seconds != work.seconds:
                work.left -= (now_s - work.since_s) / work.seconds
                work.since_s, work.seconds = now_s, seconds
                work.end.cancel()
                work.end = self.clock.at(now_s + work.left * seconds, partial(self._end, index))


class _Waves:
    """Lockstep: holds back tasks of later waves until the one before has ended."""

    def __init__(self, plan: Plan) -> None:
        numbers = {wave: number for number, wave in enumerate(sorted({task.wave for task in plan.tasks}))}
        self._wave = [numbers[task.wave] for task in plan.tasks]
        self._unfinished = [0] * len(numbers)
        for wave in self._wave:
            self._unfinished[wave] += 1
        self._held: list[list[int]] = [[] for _ in numbers]
        self._current = 0

    def may_start(self, index: int) -> bool:
        """Whether its wave has begun; if not, `ended` will return it."""
        if self._wave[index] == self._current:
            return True
        self._held[self._wave[index]].append(index)
        return False

    def ended(self, index: int) -> bool:
        """Whether the wave is over now that this task has ended."""
        self._unfinished[self._wave[index]] -= 1
        return not self._unfinished[self._wave[index]]

    def open_next(self) -> list[int]:
        """Begin the next wave, if there is one; its tasks that were held back."""
        self._current += 1
        return self._held[self._current] if self._current < len(self._held) else []
