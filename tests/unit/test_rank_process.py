"""What the launcher makes of the last words of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexcp.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FlexCPError,
    RankFailedError,
    UnsupportedError,
)
from flexcp.runtime import rank_process
from flexcp.runtime.collectives import peers_in_reach
from flexcp.runtime.rank_process import is_of_all, result_of, watch


def caused(cause: Exception | None) -> FlexCPError:
    """What all ranks raise when one cannot read: the rank itself knows the cause."""
    try:
        raise DataError("rank 1 could not read a.txt: can't allocate memory") from cause
    except DataError as error:
        return error


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("Connection closed by peer"), False),
        (caused(MemoryError()), True),
        (caused(caused(MemoryError())), True),
        (caused(None), False),
        (RankFailedError("rank 0 lost another rank"), False),
    ],
)
def test_memory_is_of_the_rank_that_ran_out(error: Exception, own: bool) -> None:
    """Also under one of FlexCP's own errors; another rank's trouble is not this rank's."""
    assert result_of(error, "trace").out_of_memory == own


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]
)
def test_a_collective_that_runs_out_of_memory_has_lost_nobody(error: RuntimeError) -> None:
    """The weights are gathered and gradients summed where memory peaks."""
    with pytest.raises(RuntimeError) as caught, peers_in_reach("gathering weights"):
        raise error

    assert caught.value is error


def test_every_look_knows_how_long_ago_the_last_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher itself was stopped in between; what to make of that, `look` decides."""
    now_s, naps_s, looks_s = [0.0], [0.5, 3600.0, 0.25], list[float]()
    rank: Any = SimpleNamespace(done=False, failed=False, pipe=None, process=SimpleNamespace(sentinel=None))
    rank.collect, rank.look = lambda: None, looks_s.append

    def nap(waitables: Any, timeout: float) -> None:
        now_s[0] += naps_s.pop(0)
        rank.done = not naps_s

    monkeypatch.setattr(rank_process, "wait", nap)
    monkeypatch.setattr(rank_process, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    watch([rank], None)

    assert looks_s == [0.5, 3600.0, 0.25]


@pytest.mark.parametrize(
    ("kind", "of_all"),
    [(ConfigError, True), (DataError, True), (UnsupportedError, False), (CheckpointError, False)],
)
def test_what_only_some_ranks_may_meet_is_not_of_all(kind: type[FlexCPError], of_all: bool) -> None:
    """A mask in one rank's sample, a file on one node's disk: that rank is named, and ends at once."""
    assert is_of_all(kind("a cause", "a remedy")) is of_all
