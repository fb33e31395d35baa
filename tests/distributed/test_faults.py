"""Ranks that die, stall, raise or run out of memory: the others end soon, and a message says where it was."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcp.core.errors import (
    FlexCPError,
    RankFailedError,
    RankLostError,
    RunError,
    UnsupportedError,
)
from flexcp.runtime.elastic import launch_elastic
from flexcp.runtime.launch import launch
from flexcp.runtime.rank_process import RankProcess
from flexcp.runtime.status import last_words, leave_word, read_status, tell
from flexcp.runtime.stopped import StoppedWatch
from tests.distributed.test_engine import make_engine, make_planner
from tests.distributed.test_lifecycle import said
from tests.harness import run_ranks
from tests.models import ListDataset, tiny_model

TIMEOUT_S = 12.0  # how long a rank may be silent here
LENGTHS = [60, 80, 100, 30, 20, 90]  # on ranks of 48 tokens: the long ones need two


class Named(ListDataset):
    """Samples with names."""

    def name(self, index: int) -> str:
        return f"file-{index}.txt"


def fail(how: str) -> None:
    """What becomes of a rank in the middle of a task."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(600)
    if how == "raise":
        raise ZeroDivisionError("of the user's own")
    if how == "refuse":
        raise UnsupportedError("a mask of the user's own", "Leave it out.")
    if how == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
        torch.zeros(2**30)


def train_until_it_fails(world: Any, how: str, folder: Path, timeout_s: float) -> None:
    """Two steps, a checkpoint after the first; the last rank fails in its first task of step 1."""
    from flexcp.integrations.transformers import enable
    from flexcp.runtime.checkpoint import save_checkpoint

    model = tiny_model()
    data = Named(LENGTHS, unlabelled=())
    planner = make_planner(world.size, tokens_per_rank=48)
    with (
        enable(model),
        make_engine(model, planner, data, global_batch=6, steps=5, timeout_s=timeout_s) as engine,
    ):
        for step in engine:
            for micro in step:
                if step.index == 1 and world.rank == world.size - 1:
                    folder.with_suffix(".failed").touch()
                    fail(how)
                step.backward(model(**micro.inputs), micro)
            step.finish()
            save_checkpoint(folder, step.index + 1, model, engine.optimizer, engine.state_dict(), 2)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("kill", RankLostError, "was killed by SIGKILL\nThe kernel does this when memory runs out"),
        ("stop", RankLostError, "stalled: its process was stopped (SIGSTOP) for 15 s"),
        pytest.param("sleep", RankLostError, "stalled, and was ended; rank ", marks=pytest.mark.slow),
        ("raise", RankFailedError, "raised:\nTraceback"),
        ("refuse", UnsupportedError, ": a mask of the user's own\nLeave it out."),
        pytest.param("memory", RankFailedError, "ran out of memory: ", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_named_with_step_task_and_samples(
    tmp_path: Path, how: str, kind: type[FlexCPError], words: str
) -> None:
    """All ranks are gone within 30 s of what any could notice, and the checkpoint of step 0 is whole."""
    from flexcp.runtime.checkpoint import checkpoints, read_state

    # A rank that sleeps looks like one that works for long; all else is noticed by itself.
    timeout_s = TIMEOUT_S if how == "sleep" else 120.0
    with pytest.raises(kind) as caught:
        launch(
            train_until_it_fails,
            3,
            (how, tmp_path / "saved", timeout_s),
            timeout_s=timeout_s,
            log_dir=tmp_path,
        )
    text = str(caught.value)
    failed_s = (tmp_path / "saved.failed").stat().st_mtime

    assert time.time() - failed_s < 30 + (TIMEOUT_S if how == "sleep" else 0)
    assert type(caught.value) is kind
    assert text.startswith(f"rank 2 on {socket.gethostname()}, in step 1, task 1 of ")
    assert "on ranks [" in text
    assert "(samples file-" in text
    assert words in text
    assert [path.name for path in checkpoints(tmp_path / "saved")] == ["step-00000001"]
    assert read_state(tmp_path / "saved" / "step-00000001")["step"] == 1
    assert len(list((tmp_path / "saved").iterdir())) == 1


def stop_while_starting(world: Any) -> None:
    """Never called: the rank is stopped while it imports this."""


def test_a_rank_stopped_before_it_joined_is_named(tmp_path: Path) -> None:
    """The others wait for it in silence, as long as they may; the launcher sees that it stands still."""
    failure: list[FlexCPError] = []

    def run() -> None:
        try:
            launch(stop_while_starting, 2, timeout_s=120.0, log_dir=tmp_path)
        except FlexCPError as error:
            failure.append(error)

    launcher = threading.Thread(target=run)
    launcher.start()
    while not (children := multiprocessing.active_children()):
        time.sleep(0.01)
    os.kill(max(child.pid or 0 for child in children), signal.SIGSTOP)
    stopped_s = time.monotonic()
    launcher.join(60)

    assert time.monotonic() - stopped_s < 30
    [error] = failure
    assert type(error) is RankLostError
    assert " stalled: its process was stopped (SIGSTOP) for 15 s" in str(error)
    assert multiprocessing.active_children() == []


def test_a_stopped_process_may_go_on_and_a_pause_of_the_launcher_does_not_count() -> None:
    """Ctrl-Z stops them all, and fg lets all of them go on."""
    process = subprocess.Popen(["sleep", "60"])
    rank = object.__new__(RankProcess)
    rank.result, rank.ended_by_us, rank._left, rank._stopped_watch = None, False, False, StoppedWatch()
    rank.process = process  # type: ignore[assignment]
    try:
        send_and_wait(process.pid, signal.SIGSTOP, "T")
        looks = [look_at(rank, 1.0) for _ in range(14)]
        send_and_wait(process.pid, signal.SIGCONT, "S")
        looks += [look_at(rank, 1.0)]
        send_and_wait(process.pid, signal.SIGSTOP, "T")
        looks += [look_at(rank, 1000.0) for _ in range(14)]
        assert not any(looks)
        assert look_at(rank, 1000.0)
        send_and_wait(process.pid, signal.SIGCONT, "S")
        assert look_at(rank, 1.0)  # the run is ending already, and needs its reason
    finally:
        process.kill()
        process.wait()


def send_and_wait(pid: int, number: int, state: str) -> None:
    """A signal is heeded a little later."""
    os.kill(pid, number)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


def look_at(rank: RankProcess, passed_s: float) -> bool:
    """Whether it is lost after one more look."""
    rank.look(passed_s)
    return rank.failed


def die_when_told_to_end(world: Any, folder: Path) -> None:
    """Rank 1 is lost when SIGTERM has come; a run that went on after that would leave a sign."""
    if world.size == 1:
        (folder / "went on").touch()
        return
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    tell("task 1 of 1", 0)
    (folder / f"rank-{world.rank}").touch()
    told.wait(60)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_rank_lost_after_sigterm_does_not_start_the_run_again(tmp_path: Path) -> None:
    """Whoever ends an elastic run means the run, not the rank that did not survive it."""

    def terminate() -> None:
        end_s = time.monotonic() + 60
        while len(list(tmp_path.glob("rank-*"))) < 2 and time.monotonic() < end_s:
            time.sleep(0.05)
        assert len(list(tmp_path.glob("rank-*"))) == 2, "the ranks did not begin"
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=terminate)
    notices: list[str] = []
    sender.start()
    with pytest.raises(RunError, match=r"^SIGTERM told the run to end; before it had, rank 1 on ") as caught:
        launch_elastic(die_when_told_to_end, 2, (tmp_path,), notify=notices.append)
    sender.join()

    assert not isinstance(caught.value, RankLostError)
    assert notices == []
    assert not (tmp_path / "went on").exists()


def save_and_die(world: Any, folder: Path, dies: bool) -> list[str]:
    """A checkpoint of step 1 and one of step 2; in the second, rank 0 is killed when all is written."""
    from flexcp.runtime import checkpoint

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for path in checkpoint.checkpoints(folder):
        checkpoint.load_checkpoint(path, model, optimizer)
    save = checkpoint.save

    def write_then_die(*arguments: Any, **options: Any) -> Any:
        written = save(*arguments, **options)
        if dies and world.rank == 0 and "step-00000002" in str(options["checkpoint_id"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    checkpoint.save = write_then_die
    for step in (1, 2):
        checkpoint.save_checkpoint(folder, step, model, optimizer, {}, keep=2)
    return sorted(path.name for path in folder.iterdir())


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Nobody takes what was half written for a checkpoint, and the next run writes over it."""
    from flexcp.runtime.checkpoint import checkpoints

    with pytest.raises(RankLostError, match="rank 0 on"):
        launch(save_and_die, 2, (tmp_path, True), timeout_s=TIMEOUT_S)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002.tmp"]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    assert run_ranks(save_and_die, 1, tmp_path, False) == [["step-00000001", "step-00000002"]]


def test_a_status_is_the_last_word_and_fits_its_file(tmp_path: Path) -> None:
    """Names that are many or odd are shortened, and groups of many ranks; what is damaged is nothing."""
    leave_word(tmp_path, 3)
    before = read_status(tmp_path, 3)
    tell("task 1 of 2 on ranks [3]", 7, [f"ø{'x' * 40}-{i}" for i in range(500)])
    status = read_status(tmp_path, 3)
    (tmp_path / "rank-4.json").write_text('{"rank": 4')

    assert (str(before), before.rank) == ("before step 0, starting", 3)
    assert (status.step, status.host) == (7, socket.gethostname())
    assert status.samples[-1] == f"and {500 - len(status.samples) + 1} more"
    assert str(status).startswith("in step 7, task 1 of 2 on ranks [3] (samples øxxx")
    assert (tmp_path / "rank-3.json").stat().st_size == 4096
    assert read_status(tmp_path, 4) is read_status(tmp_path, 9) is None
    tell(f"task 1 of 2 on ranks {list(range(2000))}", 8, ["\x01" * 1400])
    status = read_status(tmp_path, 3)
    assert str(status).startswith("in step 8, task 1 of 2 on ranks [0, 1, 2, ")
    assert str(status).endswith(" …")


def test_who_said_nothing_comes_first_of_the_last_words(tmp_path: Path) -> None:
    """Then who is silent for longest; a shared folder keeps words of a run before, and they are marked."""
    for rank in (0, 5, 3, 7):
        leave_word(tmp_path, rank)
        tell(f"task {rank}", 2)
    for rank, later_s in ((5, -7200), (0, 30), (3, 15)):
        path = tmp_path / f"rank-{rank}.json"
        word = json.loads(path.read_text())
        path.write_text(json.dumps({**word, "at_s": word["at_s"] + later_s}))

    silent, *words = last_words(tmp_path, 8, but=7).splitlines()
    host = socket.gethostname()
    assert silent == f"no word in {tmp_path} of rank 1, 2, 4, 6"
    assert words[0].startswith(f"rank 5 on {host} was 720")
    assert words[0].endswith(" s ago in step 2, task 5 (before this rank began)")
    assert words[1:] == [f"rank {rank} on {host} was 0 s ago in step 2, task {rank}" for rank in (3, 0)]
    silent, *few = last_words(tmp_path, 8, but=7, most=1).splitlines()
    assert silent.endswith(" of rank 1 and 3 more")
    assert few == words[:1]
    assert last_words(tmp_path, 1, but=0) == ""


def train_past_a_bad_sample(world: Any, kind: str) -> dict[str, Any]:
    """File 4 gives a loss that is not a number; the step with it is skipped. Then once more with "stop"."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard
    from flexcp.runtime.step import loss_sum_of

    found: dict[str, Any] = {"notices": [], "reports": [], "changed": [], "bad": [], "scheduled": []}
    model = tiny_model()
    model = shard(model, kind, blocks=blocks_of(model))
    data = Named(LENGTHS, unlabelled=())
    planner = make_planner(world.size, tokens_per_rank=48)

    def run(engine: Any) -> None:
        for step in engine:
            before = [local(p).clone() for p in model.parameters()]
            packs = [[step.plan.samples[i].id for i in task.samples] for task in step.plan.tasks]
            found["bad"].append({f"file-{i}.txt" for pack in packs for i in pack if 4 in pack})
            for micro in step:
                loss_sum = loss_sum_of(model(**micro.inputs), micro)
                step.backward(loss_sum * math.nan if 4 in micro.sample_ids else loss_sum, micro)
            found["reports"].append(step.finish())
            after = [local(p) for p in model.parameters()]
            found["changed"].append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))

    options = {
        "global_batch": 2,
        "steps": 6,
        "on_notice": found["notices"].append,
        "on_step_end": lambda: found["scheduled"].append(len(found["reports"])),
    }
    with enable(model):
        with make_engine(model, planner, data, on_bad_loss="skip", **options) as engine:
            run(engine)
            found["state"] = engine.state_dict()
        with make_engine(model, planner, data, **options) as engine:
            engine.load_state_dict(found["state"])
            found["skipped after resume"] = engine.skipped_steps
        found["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
        try:
            with make_engine(model, planner, data, on_bad_loss="stop", **options) as engine:
                run(engine)
        except FlexCPError as error:
            found["stop"] = str(error)
    return found


def local(parameter: Any) -> torch.Tensor:
    """This rank's part of it."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_that_is_not_finite_is_skipped_by_all_or_ends_the_run(kind: str) -> None:
    """No weight changes on any rank, the samples of the task are named, the steps are counted."""
    by_rank = run_ranks(train_past_a_bad_sample, 3, kind)
    for rank, found in enumerate(by_rank):
        skipped = [report.step for report in found["reports"][:6] if report.skipped]
        assert skipped
        assert len(skipped) == found["state"]["skipped_steps"] == found["skipped after resume"] < 6
        assert found["changed"][:6] == [not report.skipped for report in found["reports"][:6]]
        assert found["scheduled"][: 6 - len(skipped)] == [i for i in range(6) if i not in skipped]
        assert found["finite"]
        assert all((report.loss is None) == report.skipped for report in found["reports"])
        assert len(found["notices"]) == (len(skipped) if rank == 0 else 0)
        assert f"step {skipped[0]} has loss nan and gradient norm nan" in found["stop"]
        assert "it comes from tasks with the samples " in found["stop"]
        assert "file-4.txt" in found["stop"]
        assert "The weights were not changed." in found["stop"]
        assert json.dumps(found["reports"][skipped[0]].to_record(), allow_nan=False)
    assert all("it was skipped and no weight was changed" in text for text in by_rank[0]["notices"])
    told = [set(re.findall(r"file-\d\.txt", text)) for text in by_rank[0]["notices"]]
    assert told == [names for names in by_rank[0]["bad"][:6] if names]
    assert {"file-4.txt"} in told  # and not the other sample of its step


def start_with_another(world: Any, folder: Path, key: str) -> str:
    """Rank 1 was given another value, sees another checkpoint, or has another version installed."""
    from flexcp.runtime import agreement
    from flexcp.train import trainer
    from tests.distributed.test_training import make_config

    config = make_config(folder)
    if world.rank == 1 and key == "transformers":
        agreement.version = lambda distribution_name: "0.0" if distribution_name == key else "1.0"
    elif key == "transformers":
        agreement.version = lambda distribution_name: "1.0"
    elif world.rank == 1 and key == "newest checkpoint":
        trainer.checkpoints = lambda folder: [Path("step-00000002")]
    elif world.rank == 1:
        section, name = key.split(".")
        part = getattr(config, section).model_copy(update={name: 7})
        config = config.model_copy(update={section: part})
    return said(lambda: trainer.train(world, config, quiet=True))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("transformers", "ranks [1] have another version of transformers than rank 0 (rank {}: {})"),
        ("optimizer.lr", "ranks [1] have another optimizer.lr than rank 0 (rank {}: {})"),
        ("newest checkpoint", "ranks [1] have another newest checkpoint than rank 0 (rank {}: [{}])"),
    ],
)
def test_disagreeing_ranks_are_told_before_step_0(tmp_path: Path, key: str, words: str) -> None:
    """Versions, the resolved run file, where it begins; the key is named, and each rank says what it has."""
    from tests.distributed.test_training import make_config

    make_config(tmp_path)
    values = {
        "transformers": ("1.0", "0.0"),
        "optimizer.lr": ("0.01", "7.0"),
        "newest checkpoint": ("", "PosixPath('step-00000002')"),
    }[key]
    for rank, text in enumerate(run_ranks(start_with_another, 2, tmp_path, key)):
        assert words.format(rank, values[rank]) in text
    assert not (tmp_path / "run").exists()


def write_into_a_file(world: Any, folder: Path) -> tuple[str, str]:
    """What a checkpoint, and then a run, would make their folder in is a file, as rank 0 alone finds."""
    from flexcp.runtime.checkpoint import save_checkpoint
    from flexcp.train.trainer import train
    from tests.distributed.test_training import make_config

    model, file = tiny_model(), folder / "data" / "module_0.py"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = make_config(folder, run__folder=file / "run")
    saving = said(lambda: save_checkpoint(file / "checkpoints", 1, model, optimizer, {}, keep=1))
    return saving, said(lambda: train(world, config, quiet=True))


def test_a_folder_that_rank_0_cannot_make_ends_all(tmp_path: Path) -> None:
    """With one sentence; the others do not go on alone meanwhile."""
    from tests.distributed.test_training import make_config

    make_config(tmp_path)
    first, second = run_ranks(write_into_a_file, 2, tmp_path)

    assert first == second
    assert first[0].startswith("SaveError: the checkpoint of step 1 could not be written: rank 0: NotADir")
    assert first[1].startswith("ConfigError: run.folder ")
    assert "cannot be made or written (Not a directory)" in first[1]
