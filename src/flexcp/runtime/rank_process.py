"""The launcher's side of a local rank: one process, what it said at its end, and who is to blame."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from flexcp.core.errors import (
    CheckpointError,
    FlexCPError,
    InputError,
    MissingExtraError,
    RankFailedError,
    RankLostError,
    UnsupportedError,
)
from flexcp.runtime.collectives import is_out_of_memory
from flexcp.runtime.status import read_status
from flexcp.runtime.stopped import StoppedWatch

_POLL_S = 0.5
_SETTLE_S = 1.5  # after a first failure: time for the others to say why they failed too
_LEAVE_S = 5.0  # for ranks that have said their last word to leave
_PATIENCE_S = 10.0  # the same where all who spoke only lost another: who is silent then has stalled


@dataclass(frozen=True, slots=True)
class Result:
    """What a rank sends to its parent at its end; `summary` is one line of what it raised."""

    value: Any = None
    error: FlexCPError | None = None
    trace: str = ""
    summary: str = ""
    about_others: bool = False
    out_of_memory: bool = False


class RankProcess:
    """One child process and what became of it.

    Args:
        index: rank.
        child: importable; called in the new process with a pipe for its `Result`, then `args`.
        folder: where it leaves word of what it does.
        log_dir: where its output goes, for the message.
    """

    def __init__(
        self, index: int, child: Callable[..., None], args: Sequence[Any], folder: Path, log_dir: Path | None
    ) -> None:
        self.index = index
        self.result: Result | None = None
        self.ended_by_us = False
        self._left = False  # without a word
        self._stopped_watch = StoppedWatch()
        self._folder = folder
        self._logs = f"Its output is in {log_dir}." if log_dir else "Its output is above."
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self._theirs = theirs
        self.process: SpawnProcess = context.Process(target=child, args=(theirs, *args), daemon=False)

    def start(self) -> None:
        """Start the process, deaf to SIGINT: Ctrl-C reaches all of a terminal, and the launcher ends them.

        Here it is heard once the process stands: one that was interrupted half way would be ended by nobody.
        """
        resource_tracker.ensure_running()  # it would be started below, and lift the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._theirs.close()

    def collect(self) -> None:
        """Take the result if it has come."""
        left = self.process.exitcode is not None  # asked first: by then its last word is in the pipe
        try:
            if self.result is None and self.pipe.poll():
                self.result = pickle.loads(self.pipe.recv_bytes())  # noqa: S301  from our own child
        except (EOFError, OSError):
            pass  # the process died before it could say anything
        self._left = left and self.result is None

    def look(self, passed_s: float) -> None:
        """See whether its process is stopped: nobody who waits for it can.

        A long time since the last look is the pause of a launcher that was stopped with all its ranks.
        """
        if self.result is None:
            self._stopped_watch.look(self.process.pid, min(passed_s, 2 * _POLL_S))

    @property
    def done(self) -> bool:
        """Nothing more will come from it."""
        return self.result is not None or self._left

    @property
    def failed(self) -> bool:
        """It raised, ended by itself without a word, or was stopped for too long."""
        if self.result is None:
            # Ranks that are still alive are ended by us, which is not their failure.
            return (self._left and not self.ended_by_us) or self._stopped_watch.too_long
        return bool(self.result.trace)

    @property
    def blames_others(self) -> bool:
        """It failed, and only because another rank did."""
        return self.result is not None and self.result.about_others

    @property
    def blame(self) -> tuple[int, int]:
        """The smaller, the nearer to the cause: killed or stopped, out of memory, own error, others'."""
        if self.result is None:
            return (0, self.index)
        if self.result.out_of_memory:
            return (1, self.index)
        return (3 if self.result.about_others else 2, self.index)

    @property
    def where(self) -> str:
        """Rank, host, and what it was doing, as far as it said."""
        status = read_status(self._folder, self.index)
        doing = f", {status}," if status is not None and status.step is not None else ""
        return f"rank {self.index} on {socket.gethostname()}{doing}"

    @property
    def has_begun(self) -> bool:
        """It has come as far as a step."""
        status = read_status(self._folder, self.index)
        return status is not None and status.step is not None

    def error(self) -> FlexCPError:
        """The error that the parent raises for this rank."""
        if self._stopped_watch.too_long:
            return RankLostError(
                f"{self.where} stalled: its process {self._stopped_watch.words}",
                "Find out who stopped it; --resume goes on from the newest checkpoint.",
            )
        if self.result is None:
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            memory = "The kernel does this when memory runs out. " if code == -signal.SIGKILL else ""
            return RankLostError(f"{self.where} {how}", f"{memory}{self._logs}")
        if self.result.out_of_memory:
            return RankFailedError(
                f"{self.where} ran out of memory: {self.result.summary}",
                "Lower parallel.tokens_per_rank (with run.new_budget = true to resume), or set "
                "run.gradient_checkpointing = true.",
            )
        if self.result.error is not None:
            return self.result.error
        return RankFailedError(f"{self.where} raised:\n{self.result.trace}", self._logs)


def result_of(error: BaseException, trace: str) -> Result:
    """What a rank says of an error at its end."""
    return Result(
        error=error if isinstance(error, FlexCPError) else None,
        trace=trace,
        summary=f"{type(error).__name__}: {error}".splitlines()[0],
        about_others=_is_about_others(error),
        out_of_memory=_ran_out_of_memory(error),
    )


def is_of_all(error: BaseException | None) -> bool:
    """Whether it is about input that all ranks are given, so that all raise it and none waits for another.

    What a model meets in a step, what lies on a disk and what is installed may differ from rank to rank.
    """
    return isinstance(error, InputError) and not isinstance(
        error, UnsupportedError | CheckpointError | MissingExtraError
    )


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether this rank did: another's memory is in the text of what all raise, but not in its cause."""
    while isinstance(error, FlexCPError):
        error = error.__cause__
    return error is not None and is_out_of_memory(error)


def _is_about_others(error: BaseException) -> bool:
    """Whether a rank failed only because another one had; gloo says so in text alone."""
    return isinstance(error, RankFailedError | dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def passing_on_sigterm(ranks: Sequence[RankProcess]) -> Iterator[threading.Event]:
    """Whoever ends the launcher means the ranks; the event says whether. Only the main thread can listen."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.set()
        for rank in ranks:
            rank.process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def watch(ranks: Sequence[RankProcess], deadline_s: float | None) -> None:
    """Return when all ranks are done, one has failed (and the others had time to speak), or time is up."""
    end_s = time.monotonic() + deadline_s if deadline_s is not None else float("inf")
    first_s: float | None = None
    seen_s = time.monotonic()
    while not all(rank.done for rank in ranks) and time.monotonic() < end_s:
        open_ranks = [rank for rank in ranks if not rank.done]
        waitables: list[Any] = [rank.pipe for rank in open_ranks]
        waitables += [rank.process.sentinel for rank in open_ranks]
        wait(waitables, timeout=_POLL_S)
        passed_s, seen_s = time.monotonic() - seen_s, time.monotonic()
        for rank in open_ranks:
            rank.collect()
            rank.look(passed_s)
        if failed := [rank for rank in ranks if rank.failed]:
            first_s = first_s or time.monotonic()
            innocent = all(rank.blames_others for rank in failed)
            end_s = min(end_s, first_s + (_PATIENCE_S if innocent else _SETTLE_S))
    for rank in ranks:
        rank.collect()


def end(ranks: Sequence[RankProcess]) -> None:
    """Wait for ranks that have spoken, end those that have not: they have nothing left to save."""
    ranks = [rank for rank in ranks if rank.process.pid is not None]
    for rank in ranks:
        if rank.result is None and rank.process.is_alive():
            rank.ended_by_us = True
            rank.process.kill()
    end_s = time.monotonic() + _LEAVE_S
    for rank in ranks:
        rank.process.join(max(0.0, end_s - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()


def first_error(ranks: Sequence[RankProcess], deadline_s: float | None) -> FlexCPError | None:
    """The error of the rank nearest to the cause, if the run failed."""
    failed = [rank for rank in ranks if rank.failed]
    silent = [rank for rank in ranks if rank.result is None]
    first = min(failed, key=lambda rank: rank.blame, default=None)
    if first is not None and first.blames_others and silent:
        told = "" if first.result is None else first.result.summary
        where = "; ".join(rank.where for rank in silent).rstrip(",")
        return RankLostError(
            f"{where}: stalled, and was ended; rank {first.index}: {told}",
            "Its process was stopped, or waits for something outside; a longer run.timeout_s waits longer.",
        )
    returned = [rank.index for rank in ranks if rank.result is not None and not rank.failed]
    if first is not None and first.blames_others and returned:
        told = "" if first.result is None else first.result.summary
        return RankFailedError(
            f"ranks {returned} had returned while others were still at work; rank {first.index}: {told}",
            "All ranks run the same steps: look for a break or return that only some of them come to.",
        )
    if first is not None:
        return _with_place(first.error(), first, ranks)
    if silent:
        return RankFailedError(
            f"ranks {[rank.index for rank in silent]} had not finished after {deadline_s} s and were ended",
            "Give them more time, or look at what they wait for.",
        )
    return None


def _with_place(error: FlexCPError, first: RankProcess, ranks: Sequence[RankProcess]) -> FlexCPError:
    """One of FlexCP's own errors says where, unless all ranks raised it alike or it is about the input."""
    own = first.result.error if first.result is not None else None
    others = [rank.result.error for rank in ranks if rank is not first and rank.result is not None]
    alike = own is not None and all(other is not None and other.cause == own.cause for other in others)
    if error is not own or is_of_all(own) or (alike and len(others) == len(ranks) - 1):
        return error
    FlexCPError.__init__(error, f"{first.where.rstrip(',')}: {own.cause}", own.remedy)
    return error
