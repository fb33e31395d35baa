"""Starts ranks and joins them into one world: the only file that reads or writes environment variables.

Under torchrun the world is described by the environment. Otherwise `launch` spawns local ranks that meet
through a file (never a port, so runs on one machine cannot collide), watches them, and ends all of them
when the first one fails.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flexcp.core.errors import ConfigError, FlexCPError, RankFailedError

DEFAULT_TIMEOUT_S = 600.0
_SETTLE_S = 1.5  # after a first failure: time for the others to say why they failed too
_TERMINATE_S = 5.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among all ranks.

    Attributes:
        rank, size: global rank and number of ranks.
        local_size: ranks on this machine.
        device: where this rank computes.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device


def under_torchrun() -> bool:
    """Whether a launcher has described the world in the environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined_world(
    *, rendezvous: Path | None = None, rank: int = 0, size: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[World]:
    """Join the world, and leave it at the end.

    With `rendezvous` the ranks of one machine meet in that file; without it the environment that torchrun
    makes is used. Collectives that wait longer than `timeout_s` seconds end with an error.
    """
    local_rank, local_size = rank, size
    if rendezvous is None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    device = _device(local_rank)
    backend = "gloo" if device.type == "cpu" else None  # None: torch picks by device (NCCL, HCCL, …)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}" if rendezvous is not None else "env://",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type != "cpu" else None,
    )
    try:
        yield World(rank, size, local_size, device)
    finally:
        dist.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    if kind is None or local_rank >= torch.accelerator.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no device of its own; this machine has "
            f"{torch.accelerator.device_count()}",
            "Start at most one rank per device.",
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind.type, local_rank)


def launch(
    target: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    *,
    deadline_s: float | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    log_dir: Path | None = None,
) -> list[Any]:
    """Run `target(world, *args)` on `nproc` local ranks and return what each returned, by rank.

    Started by torchrun, this process is one of the ranks already: `target` runs right here, and only its
    own return value is in the list.

    Args:
        target: importable function; it and `args` are pickled into fresh interpreters.
        nproc: number of local ranks; torchrun knows better.
        args: further arguments, the same for every rank.
        deadline_s: the whole run may take this long; None for no limit.
        timeout_s: a collective may wait this long.
        log_dir: where each rank's output goes (`rank-0.log`, …); None leaves it on the terminal.

    Raises:
        FlexCPError: what the first failing rank raised, where it was one of FlexCP's own.
        RankFailedError: a rank was killed, raised something else, or the deadline passed; the rank is named.
    """
    if under_torchrun():
        with joined_world(timeout_s=timeout_s) as world:
            return [target(world, *args)]
    try:
        pickle.dumps((target, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{target!r} cannot be sent to another process ({error})",
            "Use a function at the top level of a module, and arguments that can be pickled.",
        ) from error
    with tempfile.TemporaryDirectory(prefix="flexcp-") as folder:
        ranks: list[_Rank] = []
        try:
            for index in range(nproc):
                ranks.append(_Rank(index, nproc, Path(folder), target, args, timeout_s, log_dir))
            _watch(ranks, deadline_s)
        finally:
            _end(ranks)
        failed = [rank for rank in ranks if rank.failed]
        if failed:
            raise min(failed, key=lambda rank: rank.blame).error(log_dir)
        if any(rank.result is None for rank in ranks):
            late = [rank.index for rank in ranks if rank.result is None]
            raise RankFailedError(
                f"ranks {late} had not finished after {deadline_s} s and were ended",
                "Give them more time, or look at what they wait for.",
            )
        return [rank.result.value for rank in ranks if rank.result is not None]


@dataclass(frozen=True, slots=True)
class _Result:
    """What a rank sends to its parent at its end."""

    value: Any = None
    error: FlexCPError | None = None
    trace: str = ""
    about_others: bool = False


class _Rank:
    """One child process and what became of it."""

    def __init__(
        self,
        index: int,
        size: int,
        folder: Path,
        target: Callable[..., Any],
        args: Sequence[Any],
        timeout_s: float,
        log_dir: Path | None,
    ) -> None:
        self.index = index
        self.result: _Result | None = None
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process: SpawnProcess = context.Process(
            target=_child, args=(theirs, target, args, index, size, folder, timeout_s, log_dir), daemon=False
        )
        self.process.start()
        theirs.close()

    def collect(self) -> None:
        """Take the result if it has come."""
        try:
            if self.result is None and self.pipe.poll():
                self.result = pickle.loads(self.pipe.recv_bytes())  # noqa: S301  from our own child
        except (EOFError, OSError):
            pass  # the process died before it could say anything; `failed` will tell

    @property
    def done(self) -> bool:
        return self.result is not None or not self.process.is_alive()

    @property
    def failed(self) -> bool:
        if self.result is None:
            # Ranks that are still alive are ended by us, which is not their failure.
            return self.process.exitcode is not None and not self.ended_by_us
        return bool(self.result.trace)

    ended_by_us = False

    @property
    def blame(self) -> tuple[int, int]:
        """The smaller, the nearer to the cause: killed, then own error, then an error about others."""
        if self.result is None:
            return (0, self.index)
        return (2 if self.result.about_others else 1, self.index)

    def error(self, log_dir: Path | None) -> FlexCPError:
        """The error that the parent raises for this rank."""
        if self.result is not None and self.result.error is not None:
            return self.result.error
        where = f"rank {self.index} on {socket.gethostname()}"
        logs = f"Its output is in {log_dir}." if log_dir else "Its output is above."
        if self.result is not None:
            return RankFailedError(f"{where} raised:\n{self.result.trace}", logs)
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return RankFailedError(f"{where} {how}", logs)


def _watch(ranks: Sequence[_Rank], deadline_s: float | None) -> None:
    """Return when all ranks are done, one has failed (and the others had time to speak), or time is up."""
    end_s = time.monotonic() + deadline_s if deadline_s is not None else float("inf")
    while not all(rank.done for rank in ranks) and time.monotonic() < end_s:
        open_ranks = [rank for rank in ranks if not rank.done]
        waitables: list[Any] = [rank.pipe for rank in open_ranks]
        waitables += [rank.process.sentinel for rank in open_ranks]
        wait(waitables, timeout=0.5)
        for rank in open_ranks:
            rank.collect()
        if any(rank.failed for rank in ranks):
            end_s = min(end_s, time.monotonic() + _SETTLE_S)
    for rank in ranks:
        rank.collect()


def _end(ranks: Sequence[_Rank]) -> None:
    """Wait for ranks that have spoken, end those that have not."""
    for rank in ranks:
        if rank.result is None and rank.process.is_alive():
            rank.ended_by_us = True
            rank.process.terminate()
    for rank in ranks:
        rank.process.join(_TERMINATE_S)
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.pipe.close()


def _child(
    pipe: Connection,
    target: Callable[..., Any],
    args: Sequence[Any],
    index: int,
    size: int,
    folder: Path,
    timeout_s: float,
    log_dir: Path | None,
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if log_dir is not None:
        _redirect_output(log_dir / f"rank-{index}.log")
    if sys.platform == "linux":  # looking the host name up is flaky on laptops and in CI
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, num_cores() // size))
    try:
        with joined_world(
            rendezvous=folder / "rendezvous", rank=index, size=size, timeout_s=timeout_s
        ) as world:
            value = target(world, *args)
        _send(pipe, _Result(value=value))
    except BaseException as error:
        trace = traceback.format_exc()
        sys.stderr.write(trace if log_dir is not None else "")
        ours = error if isinstance(error, FlexCPError) else None
        _send(pipe, _Result(error=ours, trace=trace, about_others=_is_about_others(error)))
        # A group whose peer is gone can block on its way out; the parent has what it needs.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)


def _is_about_others(error: BaseException) -> bool:
    """Whether a rank failed only because another one had; gloo says so in text alone."""
    return isinstance(error, RankFailedError | dist.DistError) or "gloo/transport" in str(error)


def _end_with_parent() -> None:
    """A launcher that was killed cannot end its ranks, so they watch it: none trains on unseen."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _send(pipe: Connection, result: _Result) -> None:
    # Not Connection.send: its pickler would pass tensors by shared memory, which dies with this process.
    pipe.send_bytes(pickle.dumps(result))


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab", buffering=0)
    os.dup2(file.fileno(), sys.stdout.fileno())
    os.dup2(file.fileno(), sys.stderr.fileno())


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
