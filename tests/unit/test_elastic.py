"""Going on with fewer ranks, as the launcher decides it: no rank is started here."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flexcp.cli import main
from flexcp.core.errors import ConfigError, FlexCPError, RankFailedError, RankLostError
from flexcp.runtime import elastic, launch
from flexcp.runtime.elastic import launch_elastic
from flexcp.runtime.rank_process import passing_on_sigterm
from flexcp.train.trainer import train


class Launches:
    """Stands for `launch`: one error or answer after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._outcomes = list(outcomes)
        for module in (elastic, launch):
            monkeypatch.setattr(module, "launch", self)

    def __call__(self, target: Any, nproc: int, args: Any = (), **options: Any) -> Any:
        self.calls.append((target, nproc, args, options))
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def lost(rank: int) -> RankLostError:
    return RankLostError(f"rank {rank} was killed", "Look at it.")


def test_every_lost_rank_makes_the_world_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch, lost(2), lost(0), ["done"])
    told: list[str] = []
    answer = launch_elastic(print, 3, ("a",), notify=told.append, timeout_s=5.0)

    assert answer == ["done"]
    assert launches.calls == [(print, nproc, ("a",), {"timeout_s": 5.0}) for nproc in (3, 2, 1)]
    assert told == [
        "rank 2 was killed; going on with 2 ranks from the newest checkpoint",
        "rank 0 was killed; going on with 1 rank from the newest checkpoint",
    ]


@pytest.mark.parametrize(
    ("nproc", "error"),
    [(1, lost(0)), (3, RankFailedError("it raised", "Mend it.")), (3, ConfigError("no", "Yes."))],
)
def test_nothing_else_starts_the_run_again(
    monkeypatch: pytest.MonkeyPatch, nproc: int, error: FlexCPError
) -> None:
    """The last rank, and errors that would come again."""
    launches = Launches(monkeypatch, error)
    told: list[str] = []
    with pytest.raises(type(error)) as caught:
        launch_elastic(print, nproc, notify=told.append)

    assert caught.value is error
    assert len(launches.calls) == 1
    assert told == []


@pytest.mark.parametrize("flag", [True, False])
def test_the_flag_reaches_launcher_and_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any, flag: bool
) -> None:
    """With it a lost rank is left behind, and those that are left may continue; without it the run ends."""
    (tmp_path / "run.toml").write_text(f'[run]\nfolder = "{tmp_path}/run"\ntimeout_s = 7\n')
    launches = Launches(monkeypatch, lost(1), ["done"])
    code = main(["train", f"{tmp_path}/run.toml", "--nproc", "2", *(["--elastic"] if flag else [])])

    assert code == (0 if flag else 1)
    assert [call[1] for call in launches.calls] == ([2, 1] if flag else [2])
    for target, _, (_, resume, quiet, told), options in launches.calls:
        assert (target, resume, quiet, told) == (train, False, False, flag)
        assert options == {"timeout_s": 7.0, "status_dir": tmp_path / "run" / "status"}
    assert ("going on with 1 rank" in capfd.readouterr().err) == flag


def test_sigterm_to_the_launcher_is_passed_on_to_all_ranks() -> None:
    """And only while it watches them."""
    ended: list[int] = []
    ranks: Any = [
        SimpleNamespace(process=SimpleNamespace(terminate=lambda rank=rank: ended.append(rank)))
        for rank in range(3)
    ]
    outside: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: outside.append(number))
    try:
        with passing_on_sigterm(ranks) as told:
            told_before = told.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ended == [0, 1, 2]
    assert (told_before, told.is_set()) == (False, True)
    assert outside == [signal.SIGTERM]
