"""The reference trainer from files to checkpoints: resume, killed ranks, full disks, bad data."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from flexcp.core.errors import CheckpointError, ConfigError, DataError, SaveError
from flexcp.core.run_folder import read_reports
from flexcp.core.trace import TraceWriter, read_spans
from flexcp.report.page.from_run import subject_of_run
from tests.harness import run_ranks

SOURCES = {f"module_{i}.py": "x = 1  # a line of text\n" * (3 + 7 * i % 40) for i in range(24)}


def make_config(folder: Path, **changes: Any) -> Any:
    """A run of seconds: three ranks, samples on one to three of them, fp32 AdamW."""
    from flexcp.train.config import TrainConfig

    data = folder / "data"
    if not data.exists():
        data.mkdir()
        for name, text in SOURCES.items():
            (data / name).write_text(text)
    sections: dict[str, dict[str, Any]] = {
        "model": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48},
        "data": {"path": str(data), "eval_samples": 3},
        "parallel": {"tokens_per_rank": 400, "whole_below_tokens": 64, "learn_costs": False},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "run": {"folder": folder / "run", "steps": 10, "global_batch": 6, "timeout_s": 30},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        sections[section][name] = value
    return TrainConfig.model_validate(sections)


def losses(folder: Path) -> dict[int, float]:
    """Loss of every step, from the metrics file."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "step" in record}


def write_traces_late() -> None:
    """Those of this rank, from here on."""
    append = TraceWriter._append

    def late(*arguments: Any) -> None:
        time.sleep(0.3)
        append(*arguments)

    TraceWriter._append = late


def train_then_resume(world: Any, folder: Path, sharding: str) -> tuple[dict[int, float], dict[int, float]]:
    """Ten steps; then again from the checkpoint of step 7."""
    from flexcp.runtime.checkpoint import checkpoints
    from flexcp.train.trainer import train

    run = folder / sharding
    config = make_config(folder, run__folder=run, parallel__sharding=sharding, run__checkpoint_every=7)
    train(world, config, quiet=True)
    unbroken = losses(run)
    dist.barrier()
    if world.rank == 0:
        after_seven, at_the_end = checkpoints(run / "checkpoints")
        shutil.rmtree(at_the_end)
        assert after_seven.name == "step-00000007"
    dist.barrier()
    if world.rank == 1:
        write_traces_late()
    summary = train(world, config, resume=True, quiet=True)
    assert [report.step for report in summary.reports] == [7, 8, 9]
    return unbroken, losses(run)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_resume_is_bitwise(tmp_path: Path, sharding: str) -> None:
    """D14, D59: unequal lengths through the real entry point; resumed after step 7, the same to the bit."""
    make_config(tmp_path)
    for unbroken, resumed in run_ranks(train_then_resume, 3, tmp_path, sharding, deadline_s=90):
        assert sorted(unbroken) == sorted(resumed) == list(range(10))
        assert unbroken == resumed
        assert unbroken[9] < unbroken[0]
    run = tmp_path / sharding
    assert list((run / "tensorboard").iterdir())
    timeline = json.loads((run / "timeline.json").read_text())
    names = {event["name"] for event in timeline["traceEvents"]}
    assert {"task", "reduce", "optimizer", "thread_name"} <= names
    ends = [(e["tid"], e["args"]["step"]) for e in timeline["traceEvents"] if e["name"] == "optimizer"]
    assert sorted(ends) == [(rank, step) for rank in range(3) for step in (7, 8, 9)]  # though rank 1 is late
    spans = [span for path in run.glob("trace/from-step-00000000/rank-*.jsonl") for span in read_spans(path)]
    degrees = {span.detail["degree"] for span in spans if span.name == "task" and span.detail}
    assert degrees >= {1, 2}
    subject = subject_of_run(run)  # of both attempts
    reports = list(read_reports(run))
    assert subject.steps == tuple(range(10))
    assert sum(subject.lengths.tokens) == pytest.approx(sum(report.tokens for report in reports))
    assert sum(share.tasks for share in subject.degrees) == sum(sum(r.degrees.values()) for r in reports)
    assert 0 < max(subject.memory.peak_tokens) <= 400
    assert subject.timelines
    for timeline in subject.timelines:
        predicted, measured = timeline.panels
        assert predicted.end_s == pytest.approx(reports[timeline.step].predicted_s)
        assert measured.end_s == pytest.approx(reports[timeline.step].measured_s, rel=0.5, abs=0.05)
        assert measured.boxes
        assert [len(box.ranks) for box in measured.boxes] == [box.degree for box in measured.boxes]


def train_and_fill_the_disk(world: Any, folder: Path) -> tuple[str, list[str], list[int]]:
    """The second checkpoint hits a limit on file size on rank 1, as a full disk would; then resume."""
    from flexcp.train import trainer

    config = make_config(folder, run__steps=4, run__checkpoint_every=2)
    save, text = trainer.save_checkpoint, "nothing was raised"
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    def save_on_a_full_disk(target: Path, step: int, *rest: Any) -> Path:
        if step == 4 and world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        return save(target, step, *rest)

    trainer.save_checkpoint = save_on_a_full_disk
    try:
        trainer.train(world, config, quiet=True)
    except SaveError as error:
        text = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    trainer.save_checkpoint = save
    dist.barrier()  # rank 0 has cleaned up
    left = sorted(path.name for path in (config.run.folder / "checkpoints").iterdir())
    dist.barrier()
    summary = trainer.train(world, config, resume=True, quiet=True)
    return text, left, [report.step for report in summary.reports]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """All ranks hear of it; the checkpoint of step 2 is whole, and the run goes on from it."""
    make_config(tmp_path)
    for text, left, steps in run_ranks(train_and_fill_the_disk, 3, tmp_path):
        assert "the checkpoint of step 4 could not be written: rank 1: " in text
        assert "Older checkpoints are untouched" in text
        assert left == ["step-00000002"]
        assert steps == [2, 3]


@contextmanager
def run_flexcp(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The command line, as a user starts it; it does not outlive the block, and its ranks end with it."""
    command = [sys.executable, "-m", "flexcp", "train", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes, **options) as run:
        try:
            yield run
        finally:
            run.kill()


def write_toml(folder: Path, **changes: Any) -> Path:
    """A run file for `make_config`'s run."""
    path = folder / "run.toml"
    lines = []
    for name, section in make_config(folder, **changes).model_dump(mode="json").items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items() if value is not None]
    path.write_text("\n".join(lines))
    return path


def test_a_killed_rank_ends_the_run(tmp_path: Path) -> None:
    """All other ranks end within 60 s and the message names the rank that was killed."""
    config = write_toml(tmp_path, run__steps=100_000)
    with run_flexcp(str(config), "--nproc", "3", "--quiet") as run:
        metrics = tmp_path / "run" / "metrics.jsonl"
        end_s = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < end_s, "training did not start"
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.2)
        ranks = children_of(run.pid)
        assert len(ranks) == 3
        killed_s = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = run.communicate(timeout=60)

    assert time.monotonic() - killed_s < 60
    assert run.returncode == 1
    assert "rank 1 on " in errors
    assert "was killed by SIGKILL" in errors
    assert not [pid for pid in ranks if is_running(pid)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGTERM, "error: SIGTERM came before the ranks could heed it"),
        (signal.SIGINT, "interrupted; there is no checkpoint to continue from"),
    ],
)
def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path, how: signal.Signals, words: str) -> None:
    """Ranks whose parent is gone end by themselves, and clear its folder away."""
    (tmp_path / "temporary").mkdir()
    config = write_toml(tmp_path, run__steps=100_000, parallel__tokens_per_rank=1600)
    env = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with run_flexcp(str(config), "--nproc", "2", "--quiet", env=env, start_new_session=True) as run:
        ranks = wait_for_ranks(run, 2)
        for rank in ranks:  # one that is told nothing, as its launcher ends while it starts it, says so
            wait_for_import(rank)
        # Ctrl-C reaches the whole group.
        (os.killpg if how == signal.SIGINT else os.kill)(run.pid, how)
        _, errors = run.communicate(timeout=200)

    assert errors.startswith(words)
    assert "Traceback" not in errors
    end_s = time.monotonic() + 60  # a rank first looks when it has imported torch
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < end_s, "a rank lives on"
        time.sleep(0.1)
    assert list((tmp_path / "temporary").glob("flexcp-*")) == []


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_ranks(run: subprocess.Popen[str], count: int) -> list[int]:
    """Process ids, once all have been started."""
    end_s = time.monotonic() + 60
    while len(ranks := children_of(run.pid)) < count:
        assert time.monotonic() < end_s, "the ranks did not start"
        time.sleep(0.1)
    return ranks


def wait_for_import(pid: int) -> None:
    """Until a rank has been told what to run and imports torch for it."""
    end_s = time.monotonic() + 60
    while b"torch" not in Path(f"/proc/{pid}/maps").read_bytes():
        assert time.monotonic() < end_s, "the rank does not import torch"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    """Process ids of the ranks, in the order of their start; multiprocessing's own helper is left out."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    children = [int(child) for child in text.split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    """Two ranks of a launcher that is not ours, described by the environment."""
    config = write_toml(tmp_path, run__steps=2, parallel__tokens_per_rank=600, data__eval_samples=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "-m", "flexcp", "train", str(config), "--quiet"],
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert run.returncode == 0, run.stderr
    assert sorted(losses(tmp_path / "run")) == [0, 1]
    assert len(list((tmp_path / "run" / "trace").rglob("rank-*.jsonl"))) == 2


@pytest.mark.parametrize(
    ("changes", "cause", "remedy"),
    [
        (
            {"data__path": "nowhere"},
            "data.path nowhere does not exist",
            "relative to where flexcp is started",
        ),
        ({"parallel__hardware": "h10"}, "unknown hardware 'h10'", "Did you mean"),
        ({"parallel__policy": "flexcpp"}, "unknown policy 'flexcpp'", "Did you mean 'flexcp'?"),
        (
            {"parallel__tokens_per_rank": 20, "parallel__whole_below_tokens": 8},
            "tokens, more than 40, and so have 24 of 24 documents",
            "too_long",
        ),
    ],
)
def test_bad_input_is_one_line_of_cause_and_one_of_remedy(
    tmp_path: Path, changes: dict[str, Any], cause: str, remedy: str
) -> None:
    """Exit code 2, no traceback, and every rank gone."""
    with run_flexcp(str(write_toml(tmp_path, **changes)), "--nproc", "2", "--quiet") as run:
        _, errors = run.communicate(timeout=60)

    assert run.returncode == 2, errors
    assert cause in errors
    assert remedy in errors
    assert "Traceback" not in errors


def test_a_run_folder_is_not_overwritten(tmp_path: Path) -> None:
    """A finished run is continued only when asked to, and only with its own data."""
    make_config(tmp_path)
    texts = run_ranks(reuse_the_folder, 1, tmp_path)[0]

    assert "already holds checkpoints (newest: step-00000002)" in texts["again"]
    assert "holds no checkpoint" in texts["nothing"]
    assert re.search(r"made with another samples: \d+ of \d+ tokens, .*; this run has 7 of ", texts["data"])
    held_out = r"made with another samples held out: 3 \([0-9a-f]{12}\); this run has 0 \("
    assert re.search(held_out, texts["seed"])
    assert "step-00000002 does not fit this model: rank 0: " in texts["shape"]
    assert "changed since the length index" in texts["index"]


def reuse_the_folder(world: Any, folder: Path) -> dict[str, str]:
    from flexcp.train.trainer import train

    def attempt(resume: bool, **changes: Any) -> str:
        try:
            train(
                world,
                make_config(folder, **{"run__steps": 2, "parallel__tokens_per_rank": 2000, **changes}),
                resume=resume,
                quiet=True,
            )
        except (CheckpointError, ConfigError, DataError) as error:
            return str(error)
        return "nothing was raised"

    assert attempt(False) == "nothing was raised"
    texts = {
        "again": attempt(False),
        "nothing": attempt(True, run__folder=folder / "other"),
        "seed": attempt(True, run__seed=1, data__eval_samples=0, run__steps=4),
        "shape": attempt(True, model__hidden=64, run__steps=4),
    }
    texts["data"] = attempt(True, data__too_long="skip", data__max_tokens=300, run__steps=4)
    (folder / "data" / "module_0.py").write_text("changed = True\n")
    texts["index"] = attempt(True, run__steps=4)
    return texts
