"""Starts ranks and joins them into one world: the only file that reads or writes environment variables.

Under torchrun the world is described by the environment. Otherwise `launch` spawns local ranks that meet
through a file (never a port, so runs on one machine cannot collide), watches them, and ends all of them
when the first one fails.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as store_at

from flexcp.core.errors import ConfigError, FlexCPError, InputError, RankLostError, RunError
from flexcp.runtime.rank_process import (
    RankProcess,
    Result,
    end,
    first_error,
    is_of_all,
    passing_on_sigterm,
    result_of,
    watch,
)
from flexcp.runtime.rendezvous import store_of_this_start
from flexcp.runtime.status import last_words, leave_word

DEFAULT_TIMEOUT_S = 600.0
_MOST_PER_CORE = 32  # ranks that sleep or wait; a number beyond is a typing error that would fill memory


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


def local_size() -> int:
    """Ranks that the launcher started on this machine; all that it knows of, if it does not say where."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


@contextmanager
def joined_world(
    *,
    rendezvous: Path | None = None,
    rank: int = 0,
    size: int = 1,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    share_devices: bool = False,
) -> Iterator[World]:
    """Join the world, and leave it at the end; an error is the end of this process's world.

    With `rendezvous` the ranks of one machine meet in that file; without it the environment that torchrun
    makes is used. Collectives that wait longer than `timeout_s` seconds end with an error. With
    `share_devices` several ranks may compute on one device; they talk through the host (gloo), slowly.
    """
    local_rank, local_size = rank, size
    timeout = timedelta(seconds=timeout_s)
    if rendezvous is not None:
        store, _, _ = next(store_at(f"file://{rendezvous}", rank, size))
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        shared, rank, size = next(store_at("env://", timeout=timeout))
        store = store_of_this_start(shared, rank, size, timeout_s)
    device = _device(local_rank, share_devices=share_devices)
    over_host = device.type == "cpu" or share_devices
    dist.init_process_group(
        "gloo" if over_host else _backend(device),
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        # Has NCCL connect at once. On other devices it does nothing, but stands in the way of gloo groups.
        device_id=device if device.type == "cuda" and not over_host else None,
    )
    yield World(rank, size, local_size, device)
    dist.destroy_process_group()  # after an error it could wait for a peer that is gone


def has_accelerators() -> bool:
    """Whether ranks compute on accelerators here: such as can talk to each other, so not the GPU of a Mac."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind is not None and _backend(kind) != "gloo"


def _backend(device: torch.device) -> str:
    """NCCL, HCCL, …; gloo where nothing else is registered."""
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def _device(local_rank: int, *, share_devices: bool) -> torch.device:
    if not has_accelerators():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if share_devices:
        local_rank %= max(1, count)
    if kind is None or local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no device of its own; this machine has {count}",
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
    status_dir: Path | None = None,
    share_devices: bool = False,
) -> list[Any]:
    """Run `target(world, *args)` on `nproc` local ranks and return what each returned, by rank.

    Started by torchrun, this process is one of the ranks already: `target` runs right here, and only its
    own return value is in the list. Of the options `timeout_s` and `status_dir` count there.

    Args:
        target: importable function; it and `args` are pickled into fresh interpreters.
        nproc: number of local ranks; torchrun knows better.
        args: further arguments, the same for every rank.
        deadline_s: the whole run may take this long; None for no limit.
        timeout_s: a collective may wait this long.
        log_dir: where each rank's output goes (`rank-0.log`, …); None leaves it on the terminal.
        status_dir: where each rank leaves word of what it does (`rank-0.json`, …), so that the others can
            say it when it is lost. Without torchrun this launcher reads it, and has a folder of its own.
        share_devices: local ranks may be more than the devices there are, for tests; see `joined_world`.

    SIGTERM is passed on to the ranks, and the run goes on until they end. SIGINT (Ctrl-C) is the launcher's
    alone: it ends the ranks and raises KeyboardInterrupt.

    Raises:
        ConfigError: no rank, more than this machine could ever serve, or a `target` that cannot be pickled.
        FlexCPError: what the first failing rank raised, where it was one of FlexCP's own.
        RankLostError: a rank was killed, left, or has stalled; it is named, and what it was doing.
        RunError: the same after SIGTERM.
        RankFailedError: a rank raised something else, ran out of memory, or the deadline passed.
    """
    if under_torchrun():
        return [_as_one_of_many(target, args, timeout_s, status_dir)]
    _require_startable(target, nproc, args)
    with tempfile.TemporaryDirectory(prefix="flexcp-") as name:
        folder = Path(name)
        given = [
            (target, args, index, nproc, folder, timeout_s, log_dir, share_devices) for index in range(nproc)
        ]
        ranks, told_to_end = _run_to_the_end(given, folder, log_dir, deadline_s)
        failure = first_error(ranks, deadline_s)
        if isinstance(failure, RankLostError) and told_to_end:
            raise _lost_after_sigterm(failure, ranks)
        if failure is not None:
            raise failure
        return [rank.result.value for rank in ranks if rank.result is not None]


def _require_startable(target: Callable[..., Any], nproc: int, args: Sequence[Any]) -> None:
    most = _MOST_PER_CORE * num_cores()
    if not 1 <= nproc <= most:
        raise ConfigError(
            f"{nproc} ranks on one machine of {num_cores()} cores",
            f"Start 1 to {most} here; torchrun starts ranks on several machines.",
        )
    try:
        pickle.dumps((target, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{target!r} cannot be sent to another process ({error})",
            "Use a function at the top level of a module, and arguments that can be pickled.",
        ) from error


def _run_to_the_end(
    given: Sequence[tuple[Any, ...]], folder: Path, log_dir: Path | None, deadline_s: float | None
) -> tuple[list[RankProcess], bool]:
    """Start a rank for each tuple of arguments of `_child`; none is left behind.

    Returns:
        The ranks, ended, and whether SIGTERM has come.
    """
    ranks = list[RankProcess]()
    with passing_on_sigterm(ranks) as told:
        try:
            for index, arguments in enumerate(given):
                ranks.append(RankProcess(index, _child, arguments, folder, log_dir))
                ranks[-1].start()
            if told.is_set():  # before all of them were there to be told
                for started in ranks:
                    started.process.terminate()
            watch(ranks, deadline_s)
        finally:
            end(ranks)
    return ranks, told.is_set()


def _lost_after_sigterm(lost: RankLostError, ranks: Sequence[RankProcess]) -> RunError:
    """Not a `RankLostError`: a run that was told to end does not go on with the ranks that are left."""
    if any(rank.has_begun for rank in ranks):
        return RunError(f"SIGTERM told the run to end; before it had, {lost.cause}", lost.remedy)
    return RunError(
        "SIGTERM came before the ranks could heed it, and has ended them",
        "Nothing was saved; checkpoints of an earlier run are untouched.",
    )


def _as_one_of_many(
    target: Callable[..., Any], args: Sequence[Any], timeout_s: float, status_dir: Path | None
) -> Any:
    """This process is a rank of torchrun's."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if status_dir is not None:
        with suppress(OSError):
            status_dir.mkdir(parents=True, exist_ok=True)
        leave_word(status_dir, rank)
    try:
        with joined_world(timeout_s=timeout_s) as world:
            return target(world, *args)
    except BaseException as error:
        if is_of_all(error):
            raise  # so nothing waits
        text = str(error) if isinstance(error, FlexCPError) else traceback.format_exc()
        others = last_words(status_dir, size, but=rank) if status_dir is not None else ""
        sys.stderr.write(f"rank {rank} on {socket.gethostname()}: {text}\n{others}\n")
        sys.stderr.flush()
        # The way out of an interpreter joins threads that wait for ranks that are gone.
        os._exit(2 if isinstance(error, InputError) else 1)


def _child(
    pipe: Connection,
    target: Callable[..., Any],
    args: Sequence[Any],
    index: int,
    size: int,
    folder: Path,
    timeout_s: float,
    log_dir: Path | None,
    share_devices: bool,
) -> None:
    if log_dir is not None:
        _redirect_output(log_dir / f"rank-{index}.log")
    if sys.platform == "linux":  # looking the host name up is flaky on laptops and in CI
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, num_cores() // size))
    leave_word(folder, index)
    # Now that the word is left: made later, it could outlive a folder that another rank has cleared away.
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        with joined_world(
            rendezvous=folder / "rendezvous",
            rank=index,
            size=size,
            timeout_s=timeout_s,
            share_devices=share_devices,
        ) as world:
            value = target(world, *args)
        _send(pipe, Result(value=value))
    except BaseException as error:
        trace = traceback.format_exc()
        sys.stderr.write(trace if log_dir is not None else "")
        _send(pipe, result_of(error, trace))
        # A group whose peer is gone can block on its way out; the parent has what it needs.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)


def _end_with_parent(folder: Path) -> None:
    """A launcher that was killed cannot end its ranks, so they watch it: none trains on unseen.

    Nor can it clear its folder away.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _send(pipe: Connection, result: Result) -> None:
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
