"""Plans made beside training: in a process of their own on rank 0, and agreed on by all ranks.

A plan is a function of its request alone, so nothing here depends on how long planning takes, and a process
that died can be replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Protocol, cast

import torch
import torch.distributed as dist

from flexcp.core.cluster import Cluster
from flexcp.core.errors import DisagreementError, FlexCPError, RunError, summary_of
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.planner import Planner
from flexcp.planner.check import check_answer
from flexcp.planner.serve import read_answer, request_line
from flexcp.runtime.collectives import all_gather_rows, collective_device, raise_first
from flexcp.runtime.stopped import StoppedWatch

_LOOK_S = 1.0

Notify = Callable[[str], object]

# The path of imports is handed over, so that both processes run the same FlexCP.
_SERVE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from flexcp.planner.serve import main; main(int(sys.argv[2]))"
)


class AnyPlanner(Protocol):
    """What the engine needs: `flexcp.Planner`, or a planner of one's own."""

    @property
    def cluster(self) -> Cluster:
        """What it plans for."""

    def __call__(self, samples: Sequence[Sample], /) -> Plan:
        """Plan one global batch."""


@dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan as text, and the seconds from asking to having it."""

    text: str
    plan_s: float


class Planning:
    """Plans of coming global batches, one after the other in the background of one rank.

    Args:
        planner: a `flexcp.Planner` plans in a process of its own. Any other callable plans in a thread: it
            need not be something that can be written as JSON, and shares the interpreter with training.
        notify: told when the process had to be started again; called from a background thread.
    """

    def __init__(self, planner: AnyPlanner, notify: Notify) -> None:
        self._planner = planner
        self._pool = ThreadPoolExecutor(1, "flexcp-plan")
        self.process = PlannerProcess(notify) if isinstance(planner, Planner) else None

    def submit(self, samples: Sequence[Sample], planner: AnyPlanner | None = None) -> Future[MadePlan]:
        """Start planning one global batch, by another planner of the same kind if given; returns at once."""
        return self._pool.submit(self._make, samples, planner or self._planner)

    def _make(self, samples: Sequence[Sample], planner: AnyPlanner) -> MadePlan:
        start_s = time.perf_counter()
        if self.process is None:
            text = _own_plan(planner, samples).to_json()
        else:
            text = self.process.ask(request_line(cast(Planner, planner), samples))
        return MadePlan(text, time.perf_counter() - start_s)

    def close(self, wait: bool = True) -> None:
        """End thread and process. Unfinished plans of the process fail; others are waited for.

        Args:
            wait: for them, too.
        """
        if self.process is not None:
            self.process.end()
        self._pool.shutdown(wait or self.process is not None)
        if self.process is not None:
            self.process.close()


def _own_plan(planner: AnyPlanner, samples: Sequence[Sample]) -> Plan:
    """What a planner of the user's own plans; other samples, or a rank twice, would train something else."""
    name = type(planner).__name__
    try:
        plan = planner(samples)
    except FlexCPError:
        raise
    except Exception as error:
        raise RunError(f"{name} raised {summary_of(error)}", "Mend this planner.") from error
    if wrong := check_answer(plan, samples, planner.cluster):
        raise RunError(
            f"the plan of {name} cannot run: {'; '.join(wrong[:3])}",
            "A planner plans every sample that it is given, in their order, for its own cluster.",
        )
    return plan


class PlannerProcess:
    """A process that plans (`planner.serve`); started again once if it dies, and then named.

    It ends by itself when this process does, because its input ends.

    Args:
        notify: told of its death when it is started again.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._process, self._stopped_watch = _start(), StoppedWatch()
        self._started_again = False
        self._ended = False
        self._lock = threading.Lock()  # between starting again and ending, by two threads
        self._over = threading.Event()
        threading.Thread(target=self._look, name="flexcp-planner-look", daemon=True).start()

    def _look(self) -> None:
        """End a process that somebody has stopped: its silence looks like that of a long plan."""
        while not self._over.wait(_LOOK_S):
            process = self._process  # another may take its place meanwhile
            if self._stopped_watch.look(process.pid, _LOOK_S):
                process.kill()

    @property
    def pid(self) -> int:
        """Of the process that answers now."""
        return self._process.pid

    def ask(self, request: str) -> str:
        """JSON of the plan that `request` asks for; one request at a time.

        Raises:
            FlexCPError: what the planner raised.
            RunError: the process died a second time, or was ended.
        """
        while not (answer := self._exchange(request)).endswith("\n"):
            self._start_again()
        return read_answer(answer)

    def _exchange(self, request: str) -> str:
        """The answer; without its end if the process died before."""
        try:
            self._requests.write(request)
            self._requests.flush()
            return self._answers.readline()
        except OSError:
            return ""

    def _start_again(self) -> None:
        self._refuse_if_ended()
        how = _end_of(self._process)
        if self._stopped_watch.too_long:
            how = f"{self._stopped_watch.words} and ended"
        died = f"the planner process {self.pid} of rank 0 {how}"
        if self._started_again:
            raise RunError(
                f"{died}, after it had been started again once",
                "Its own output says why, or the machine is short of memory. Continue from a checkpoint.",
            )
        self._started_again = True
        self.close()
        with self._lock:
            self._refuse_if_ended()
            self._stopped_watch, self._process = StoppedWatch(), _start()
        self._notify(f"{died}; it was started again, and no plan is lost")

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise RunError(
                "the planner process was ended", "The engine was closed before this plan was made."
            )

    def end(self) -> None:
        """Kill it; a request under way fails, and none is started again."""
        self._over.set()
        with self._lock:
            self._ended = True
            self._process.kill()

    def close(self) -> None:
        """Give back what a dead process leaves behind."""
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):  # a request that was never read
                pipe.close()

    @property
    def _requests(self) -> IO[str]:
        return cast(IO[str], self._process.stdin)

    @property
    def _answers(self) -> IO[str]:
        return cast(IO[str], self._process.stdout)


def _start() -> subprocess.Popen[str]:
    """In a session of its own: signals meant for training must not end it before training ends."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVE, json.dumps(sys.path), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def _end_of(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def meet(digest: str, supervised_tokens: int, trouble: Exception | None) -> int:
    """The exchange that opens a step; returns the supervised tokens of the whole global batch.

    Args:
        digest: SHA-256 of the plan that this rank is about to run.
        supervised_tokens: of this rank's rows.
        trouble: why this rank cannot run it (its data could not be read).

    Raises:
        FlexCPError: the trouble of some rank, on all ranks alike, before any gradient.
        DisagreementError: ranks hold different plans; they are named.
    """
    what = "the opening of a step"
    short = int(digest[:15], 16)
    mine = [supervised_tokens, short, trouble is not None]
    rows = all_gather_rows(torch.tensor(mine, dtype=torch.int64, device=collective_device()), what)
    raise_first(rows[:, 2], trouble, what)
    others = [rank for rank, row in enumerate(rows.tolist()) if row[1] != short]
    if others:
        raise DisagreementError(
            f"rank {dist.get_rank()} and ranks {others} hold different plans",
            "All ranks must run the same version of FlexCP with the same configuration.",
        )
    return int(rows[:, 0].sum())
