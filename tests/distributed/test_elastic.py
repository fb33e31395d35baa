"""Resuming on another number of ranks, going on with one rank fewer, and ending when told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from flexcp.core.errors import CheckpointError
from flexcp.core.trace import read_spans
from flexcp.report.page.from_run import subject_of_run
from flexcp.report.page.subject import plans_of
from tests.distributed.test_training import (
    children_of,
    is_running,
    losses,
    make_config,
    run_flexcp,
    write_toml,
)
from tests.harness import run_ranks

WAIT_S = 400.0  # for steps to be done on a machine that others use too


def train_to(
    world: Any, folder: Path, sharding: str, run: str, steps: int, resume: bool
) -> dict[int, float | None]:
    """A run of ten steps as `make_config` says, as far as `steps`; on any number of ranks.

    The checkpoint of the end is dropped, so that the learning rate is that of ten steps throughout.
    """
    from flexcp.train import trainer

    # Samples of up to 1,104 tokens: what is planned differs on every number of ranks.
    config = make_config(
        folder,
        run__folder=folder / run,
        run__steps=10,
        run__checkpoint_every=1,
        parallel__sharding=sharding,
        data__eval_samples=4,
        data__max_tokens=1_200,
    )
    if steps < 10:
        _end_after(trainer, steps)
    summary = trainer.train(world, config, resume=resume, quiet=True)
    assert len(summary.reports) == len({report.step for report in summary.reports})
    return {report.step: report.loss for report in summary.reports}


def _end_after(trainer: Any, steps: int) -> None:
    """SIGTERM to the last rank in its last step; the others learn of it when the step ends."""
    save = trainer._Loop._save

    def save_then_ask(self: Any, done: int) -> None:
        save(self, done)
        if done == steps - 1 and self.engine.rank == self.engine.planner.cluster.ranks - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer._Loop._save = save_then_ask


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_resume_on_other_numbers_of_ranks(tmp_path: Path, sharding: str) -> None:
    """4 -> 3 -> 5: the same samples in every step, and the losses of a run that was never interrupted.

    Each part is ended by SIGTERM to one rank, which all ranks heed together at the end of the step.
    """
    make_config(tmp_path)
    unbroken = run_ranks(train_to, 4, tmp_path, sharding, "unbroken", 10, False)[0]
    parts = [
        run_ranks(train_to, ranks, tmp_path, sharding, "broken", steps, ranks != 4)
        for ranks, steps in ((4, 3), (3, 6), (5, 10))
    ]

    assert [sorted(part[0]) for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert all(rank == part[0] for part in parts for rank in part)
    broken = {step: loss for part in parts for step, loss in part[0].items()}
    assert broken == pytest.approx(unbroken, rel=1e-4)
    assert losses(tmp_path / "broken") == broken
    records = {run: _records(tmp_path / run) for run in ("unbroken", "broken")}
    assert [r["tokens"] for r in records["broken"]] == [r["tokens"] for r in records["unbroken"]]
    assert records["broken"][7]["predicted_s"] != records["unbroken"][7]["predicted_s"]
    page = subject_of_run(tmp_path / "broken")  # of all ranks of all three
    assert sum(page.lengths.tokens) == pytest.approx(sum(r["tokens"] for r in records["broken"]))
    planned_s = [timeline.panels[0].end_s for timeline in page.timelines]
    assert page.policies[-1].step_s == pytest.approx(sum(planned_s) / len(planned_s))
    assert {plans_of(page, step)[0].cluster.ranks for step in (0, 9)} == {4, 5}


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "step" in record]


def wait_for_steps(folder: Path, count: int, *runs: subprocess.Popen[str]) -> None:
    """Until so many steps are in the metrics file."""
    end_s = time.monotonic() + WAIT_S
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and len(_records(folder)) >= count):
        assert time.monotonic() < end_s, "the steps were not done"
        for run in runs:
            assert run.poll() is None, run.communicate()[1]
        time.sleep(0.3)


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def told_to_end(run: subprocess.Popen[str], checkpoints: Path) -> tuple[str, str]:
    """What it said; told ten times a second, until it has saved, and once more on its way out."""
    end_s = time.monotonic() + WAIT_S
    while not list(checkpoints.glob("step-????????")):
        assert time.monotonic() < end_s, "it does not save"
        run.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    return run.communicate(timeout=WAIT_S)


def test_sigterm_saves_and_exits_0(tmp_path: Path) -> None:
    """Sent to the launcher, heeded by all ranks at the end of the same step; the run can go on.

    Sent again and again, as impatient people and schedulers do.
    """
    config = write_toml(tmp_path, run__steps=100_000, parallel__tokens_per_rank=700)
    with run_flexcp(str(config), "--nproc", "2") as run:
        wait_for_steps(tmp_path / "run", 2, run)
        ranks = children_of(run.pid)
        assert len(ranks) == 2
        output, errors = told_to_end(run, tmp_path / "run" / "checkpoints")

    done = max(losses(tmp_path / "run")) + 1
    assert run.returncode == 0, errors
    assert f"SIGTERM: ended after {done} of 100000 steps; --resume goes on" in output
    assert checkpoint_names(tmp_path / "run") == [f"step-{done:08d}"]
    assert not [pid for pid in ranks if is_running(pid)]


def test_a_lost_rank_is_left_behind(tmp_path: Path) -> None:
    """`--elastic`: a rank of three is killed; two go on from the newest checkpoint, and end the run."""
    config = write_toml(
        tmp_path, run__steps=40, run__checkpoint_every=2, run__timeout_s=120, parallel__tokens_per_rank=700
    )
    with run_flexcp(str(config), "--nproc", "3", "--quiet", "--elastic") as run:
        wait_for_steps(tmp_path / "run", 3, run)
        os.kill(children_of(run.pid)[2], signal.SIGKILL)
        _, errors = run.communicate(timeout=2 * WAIT_S)

    assert run.returncode == 0, errors
    assert f"rank 2 on {socket.gethostname()}, in step " in errors
    assert "was killed by SIGKILL; going on with 2 ranks from the newest checkpoint" in errors
    assert sorted(losses(tmp_path / "run")) == list(range(40))
    assert checkpoint_names(tmp_path / "run")[-1] == "step-00000040"
    attempts = sorted((tmp_path / "run" / "trace").iterdir())
    assert [len(list(path.glob("rank-*"))) for path in attempts] == [3, 2]
    assert all(list(read_spans(path)) for path in attempts[-1].glob("rank-*"))


def test_a_checkpoint_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    """Data, tokenizer, held-out samples or budget: what differs is named with both values."""
    make_config(tmp_path)
    texts = run_ranks(resume_with_others, 1, tmp_path)[0]

    assert "made with another parallel.tokens_per_rank: 2000; this run has 1900" in texts["budget"]
    assert "run.new_budget = true" in texts["budget"]
    assert texts["new budget"] == "nothing was raised"
    assert "made with another samples held out: 3 (" in texts["held out"]
    assert "); this run has 4 (" in texts["held out"]
    assert "made with another data (files and their sizes): 24 files, " in texts["data"]
    assert "; this run has 23 files, " in texts["data"]
    assert "made with another tokenizer: bytes/1; this run has " in texts["tokenizer"]


def resume_with_others(world: Any, folder: Path) -> dict[str, str]:
    from flexcp.train.data.tokenizers import train_bpe
    from flexcp.train.trainer import train

    def attempt(resume: bool, **changes: Any) -> str:
        given = {"run__steps": 2, "parallel__tokens_per_rank": 2000, **changes}
        try:
            train(world, make_config(folder, **given), resume=resume, quiet=True)
        except CheckpointError as error:
            return str(error)
        return "nothing was raised"

    assert attempt(False) == "nothing was raised"
    train_bpe(["x = 1  # a line of text\n"] * 9, 260, folder / "tokenizer.json")
    more = {"run__steps": 3, "data__index_dir": folder / "index"}
    texts = {
        "budget": attempt(True, parallel__tokens_per_rank=1900),
        "held out": attempt(True, data__eval_samples=4),
        "data": attempt(True, data__exclude=("module_0.py",), **more),
        "tokenizer": attempt(True, data__tokenizer=str(folder / "tokenizer.json"), **more),
    }
    texts["new budget"] = attempt(True, parallel__tokens_per_rank=1900, run__new_budget=True)
    return texts
