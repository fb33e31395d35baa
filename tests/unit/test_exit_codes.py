"""What the command line exits with: 2 for what the user must mend before a run, 1 for a run that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed.test_training import write_toml

import flexcp.cli
from flexcp.core import errors
from flexcp.core.errors import FlexCPError, InputError, MissingExtraError, UnknownNameError

_KINDS = errors._kinds(FlexCPError)
_FAILED = {"RunError", "RankFailedError", "RankLostError", "LossError", "SaveError", "DisagreementError"}
_OURS = {"FlexCPError", "PlanError"}  # nothing that a user gave


def error_of(kind: str) -> FlexCPError:
    """One of that kind."""
    if kind == "MissingExtraError":
        return MissingExtraError("wandb", "wandb")
    if kind == "UnknownNameError":
        return UnknownNameError("policy", "flexpc", ["flexcp"])
    error = _KINDS[kind].__new__(_KINDS[kind])
    FlexCPError.__init__(error, "a cause", "a remedy")
    return error


@pytest.mark.parametrize("kind", sorted(_KINDS))
def test_input_that_cannot_be_used_exits_2(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of error is one or the other."""

    def fail(**_options: object) -> None:
        raise error_of(kind)

    monkeypatch.setattr(flexcp.cli, "app", fail)
    code = flexcp.cli.main(["train"])

    assert code == (1 if kind in _FAILED | _OURS else 2)
    assert issubclass(_KINDS[kind], InputError) == (code == 2)


def test_resuming_from_nothing_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rank is started for it."""
    code = flexcp.cli.main(["train", str(write_toml(tmp_path)), "--resume"])

    assert code == 2
    assert f"error: {tmp_path / 'run'} holds no checkpoint" in capsys.readouterr().err


def test_sigterm_before_there_are_ranks_is_heeded(tmp_path: Path) -> None:
    """Importing torch takes seconds; a scheduler that ends the job by then gets a word and exit code 1."""
    code = f"""
import os, signal, sys
class Scheduler:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Scheduler())
from flexcp.cli import main
sys.exit(main(["train", {str(write_toml(tmp_path))!r}]))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)

    assert process.returncode == 1
    assert process.stderr == "SIGTERM came while there was no rank to heed it; nothing was begun\n"
    assert not (tmp_path / "run").exists()
