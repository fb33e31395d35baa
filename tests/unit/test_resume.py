"""Runs that end early and go on: one rank, in this process."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.test_training import losses, make_config

from flexcp.core.errors import (
    CheckpointError,
    ConfigError,
    FlexCPError,
    LossError,
    RankFailedError,
    RunError,
    SaveError,
)
from flexcp.runtime import checkpoint as checkpoints_module
from flexcp.runtime.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from flexcp.runtime.launch import World, joined_world
from flexcp.train import trainer
from flexcp.train.capacity import capacity_tokens, hopeless_notice
from flexcp.train.outputs import Outputs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Of one rank."""
    with joined_world(rendezvous=tmp_path_factory.mktemp("world") / "meet") as joined:
        yield joined


def config_of(folder: Path, **changes: Any) -> Any:
    """A run of one rank."""
    return make_config(folder, **{"parallel__tokens_per_rank": 2000, "data__eval_samples": 0, **changes})


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    told: list[str] = []
    monkeypatch.setattr(Outputs, "notice", lambda self, text: told.append(text))
    return told


def test_settings_of_the_optimizer_follow_the_config(
    world: World, tmp_path: Path, notices: list[str]
) -> None:
    """A new learning rate takes effect where the run goes on, and a notice names old and new."""
    trainer.train(world, config_of(tmp_path, run__steps=4), quiet=True)
    changed = {"optimizer__lr": 4e-3, "optimizer__weight_decay": 0.25, "optimizer__betas": (0.8, 0.9)}
    seen: list[Any] = []
    save = trainer._Loop._save

    def look(loop: Any, done: int) -> None:
        seen.append(loop)
        save(loop, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer._Loop, "_save", look)
        trainer.train(world, config_of(tmp_path, run__steps=6, **changed), resume=True, quiet=True)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    section = config_of(tmp_path, **changed).optimizer
    expected = [4e-3 * trainer.learning_rate_factor(section, 6, step) for step in (5, 6)]
    assert [line["lr"] for line in lines if "step" in line][4:] == pytest.approx(expected, rel=1e-12)
    groups = seen[-1].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert {tuple(group["betas"]) for group in groups} == {(0.8, 0.9)}
    assert "optimizer.lr was 0.01 and is 0.004 from step 4 on" in notices
    assert "optimizer.betas was [0.9, 0.95] and is [0.8, 0.9] from step 4 on" in notices
    assert "optimizer.weight_decay was 0.1 and is 0.25 from step 4 on" in notices


def test_a_derived_budget_is_compared(world: World, tmp_path: Path) -> None:
    """Another share of memory is another budget, also where nobody wrote it down."""
    trainer.train(world, config_of(tmp_path, run__steps=1, parallel__tokens_per_rank=None), quiet=True)
    other = config_of(tmp_path, run__steps=2, parallel__tokens_per_rank=None, parallel__memory_margin=0.5)

    with pytest.raises(
        CheckpointError, match=r"another parallel.tokens_per_rank: (\d+); this run has (?!\1)"
    ):
        trainer.train(world, other, resume=True, quiet=True)


def test_the_limit_is_that_of_the_first_start(world: World, tmp_path: Path, notices: list[str]) -> None:
    """`too_long = "skip"` without a limit: samples must not come and go with ranks or budgets."""
    given = {"data__too_long": "skip", "run__new_budget": True}
    trainer.train(
        world, config_of(tmp_path, run__steps=1, parallel__tokens_per_rank=600, **given), quiet=True
    )
    later = config_of(tmp_path, run__steps=2, parallel__tokens_per_rank=900, **given)
    summary = trainer.train(world, later, resume=True, quiet=True)

    assert [report.step for report in summary.reports] == [1]
    assert read_state(checkpoints(tmp_path / "run" / "checkpoints")[-1])["max_tokens"] == 600


@pytest.mark.parametrize(
    ("size", "local", "too_long", "ranks"),
    [(4, 4, "skip", 3), (4, 4, "error", 4), (16, 8, "skip", 8), (1, 1, "skip", 1)],
)
def test_an_elastic_run_leaves_out_what_the_others_could_not_hold(
    tmp_path: Path, size: int, local: int, too_long: Any, ranks: int
) -> None:
    """One rank of one node, or one node of several, can be lost; and a first start decides."""
    config = config_of(tmp_path, parallel__tokens_per_rank=100, data__too_long=too_long)
    many = World(0, size, local, torch.device("cpu"))

    assert capacity_tokens(config, many, True, None, 259) == 100 * ranks
    assert capacity_tokens(config, many, False, None, 259) == 100 * size
    assert capacity_tokens(config, many, True, 700, 259) == 700


def test_a_loss_that_is_not_finite_ends_the_run_with_a_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights were not touched, so what was reached is kept."""
    forward = trainer._forward

    metrics = tmp_path / "run" / "metrics.jsonl"

    def broken(model: Any, config: Any) -> Any:
        inner = forward(model, config)

        def run(micro: Any) -> Any:
            steps_done = metrics.read_text().count("\n") if metrics.exists() else 0
            return inner(micro).logits * (math.nan if steps_done == 2 else 1.0)

        return run

    monkeypatch.setattr(trainer, "_forward", broken)
    with pytest.raises(LossError, match="step 2 has loss nan"):
        trainer.train(world, config_of(tmp_path, run__steps=5), quiet=True)

    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000002"]


def test_sigterm_ends_a_run_behind_its_step_with_a_checkpoint(
    world: World, tmp_path: Path, notices: list[str]
) -> None:
    """Heard behind step 1, heeded behind step 2; what is left of the run is done when it is resumed."""
    show = Outputs.step

    def show_and_end(outputs: Outputs, report: Any, *rest: Any) -> None:
        show(outputs, report, *rest)
        if report.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    config = config_of(tmp_path, run__steps=5, run__save_model=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outputs, "step", show_and_end)
        summary = trainer.train(world, config, quiet=True)

    assert [report.step for report in summary.reports] == [0, 1, 2]
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000003"]
    assert "SIGTERM: ended after 3 of 5 steps; --resume goes on" in notices
    assert not (tmp_path / "run" / "model").exists()
    resumed = trainer.train(world, config, resume=True, quiet=True)
    assert [report.step for report in resumed.reports] == [3, 4]
    assert (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(("record", "saved"), [("step", "step-00000001"), ("eval_loss", "step-00000002")])
def test_what_cannot_be_written_down_is_saved(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, saved: str
) -> None:
    """A tracker that fails on rank 0 ends all ranks, at a step or an evaluation, and no step is lost."""

    def fail(self: Outputs, values: dict[str, object]) -> None:
        if record in values:
            raise OSError("disk full")

    monkeypatch.setattr(Outputs, "_append", fail)
    config = config_of(tmp_path, run__steps=5, run__eval_every=2, data__eval_samples=3)
    with pytest.raises(FlexCPError, match=r"cannot be written to .*: disk full\nMake room"):
        trainer.train(world, config, quiet=True)

    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == [saved]


def test_nothing_is_saved_with_a_rank_that_is_lost(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would only wait for it once more, and then blame the checkpoint."""

    def lost(what: str) -> None:
        if what == "writing down a step":
            raise RankFailedError("rank 0 lost another rank during writing down a step")

    monkeypatch.setattr(trainer, "alike", lambda what: contextlib.nullcontext(lost(what)))
    with pytest.raises(RankFailedError, match="during writing down a step"):
        trainer.train(world, config_of(tmp_path, run__steps=5), quiet=True)

    assert checkpoints(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("what", ["evaluation", "finish"])
def test_a_run_folder_that_goes_away_is_a_sentence(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Removed under the run, before what rank 0 writes beside steps; what was learnt is saved."""
    write = getattr(Outputs, what)

    def remove_and_write(outputs: Outputs, *values: Any) -> None:
        shutil.rmtree(tmp_path / "run")
        write(outputs, *values)

    monkeypatch.setattr(Outputs, what, remove_and_write)
    config = config_of(tmp_path, run__steps=2, run__trackers=(), data__eval_samples=3)
    with pytest.raises(RunError, match=r"cannot be written to .*/run/.*: No such file"):
        trainer.train(world, config, quiet=True)

    saved = checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == (["step-00000002"] if what == "evaluation" else [])


def test_a_run_folder_is_of_one_run_at_a_time(world: World, tmp_path: Path) -> None:
    """A second run is refused while the first one writes, and none once it has ended.

    An elastic one is not: what writes may be an attempt that is lost with its node.
    """
    config = config_of(tmp_path, run__steps=1)
    with Outputs(config, 0, rank=0, shown=False):
        with pytest.raises(ConfigError, match="another run is writing to"):
            trainer.train(world, config, quiet=True)
        trainer.train(world, config, quiet=True, elastic=True)
    trainer.train(world, config_of(tmp_path, run__steps=2), resume=True, quiet=True)

    assert sorted(losses(tmp_path / "run")) == [0, 1]


DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"schema": "flexcp.checkpoint/2"}, "has schema 'flexcp.checkpoint/2'; this version reads"),
    ({"step": "2"}, r"\(step: Input should be a valid integer\)"),
    ({"step": -1}, r"\(step: Input should be greater than or equal to 0\)"),
    ({"step": 1}, r"\(engine.step is 2 and step 1\)"),
    ({"ranks": -1}, r"\(ranks: Input should be greater than 0\)"),
    ({"ranks": None}, r"\(ranks: Input should be a valid integer\)"),
    ({"max_tokens": "x"}, r"\(max_tokens: "),
    ({"engine": []}, r"\(engine: "),
    ({"engine": {"step": 2}}, r"\(engine.skipped_steps: Field required\)"),
    ({"schedule": {}}, r"\(schedule.last_epoch: "),
    ({"made_with": [1]}, r"\(made_with: "),
    ({"optimizer": None}, r"\(optimizer: "),
]


def test_a_damaged_checkpoint_is_refused_by_what_is_wrong(world: World, tmp_path: Path) -> None:
    """Missing or of another type, whatever it is; and all of it is named before anything is loaded."""
    trainer.train(world, config_of(tmp_path, run__steps=2), quiet=True)
    file = checkpoints(tmp_path / "run" / "checkpoints")[-1] / "flexcp.json"
    whole = file.read_text()
    for change, words in DAMAGES:
        file.write_text(json.dumps({**json.loads(whole), **change}))
        with pytest.raises(CheckpointError, match=words):
            trainer.train(world, config_of(tmp_path, run__steps=3), resume=True, quiet=True)
    for text in ("", "[1]", whole[:40], "[" * 100_000):
        file.write_text(text)
        with pytest.raises(CheckpointError, match="is not a FlexCP checkpoint"):
            trainer.train(world, config_of(tmp_path, run__steps=3), resume=True, quiet=True)


def test_weights_that_changed_on_the_disk_are_refused(world: World, tmp_path: Path) -> None:
    """A single bit of a weight: torch itself reads it without a word."""
    folder = save(tmp_path, 1, mark=0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [file] = folder.glob("*.distcp")
    whole = file.read_bytes()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    marks = [whole.index(weights.numpy().tobytes()) for weights in read_weights(folder)]
    for place in marks:
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        file.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match=r"\.distcp is damaged"):
            load_checkpoint(folder, model, optimizer)
    for size in (0, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"\.distcp is damaged"):
            load_checkpoint(folder, model, optimizer)

    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())
    file.write_bytes(whole)
    load_checkpoint(folder, model, optimizer)
    assert not any(bool((parameter == 7.0).any()) for parameter in model.parameters())


def test_files_of_several_checkpoints_are_refused(world: World, tmp_path: Path) -> None:
    """They fit, and every one of them is whole; a model of 2 steps would go on as one of 3."""
    old, new = (save(tmp_path, step, mark=step) for step in (2, 3))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for name in ("__0_0.distcp", "flexcp.json"):
        own = (new / name).read_bytes()
        shutil.copy(old / name, new / name)
        with pytest.raises(
            CheckpointError, match=r"__0_0.distcp and .*flexcp.json are of different checkpoints"
        ):
            load_checkpoint(new, model, optimizer)
        (new / name).write_bytes(own)

    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    load_checkpoint(new, model, optimizer)
    assert not torch.equal(next(model.parameters()), before[0])


@pytest.mark.parametrize("damage", [b"", b"\0" * 99, None])
def test_a_damaged_table_of_contents_is_a_sentence(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: bytes | None
) -> None:
    """torch would say it in two traces and an assertion."""
    folder = save(tmp_path, 1, mark=0)
    (folder / ".metadata").unlink()
    if damage is not None:
        (folder / ".metadata").write_bytes(damage)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged or missing \(.*\)\nRemove this"):
        load_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))

    assert capfd.readouterr().err == ""


def test_a_file_that_is_missing_is_named(world: World, tmp_path: Path) -> None:
    folder = save(tmp_path, 1, mark=0)
    (folder / "__0_0.distcp").unlink()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"cannot be read: rank 0: .*No such file.*__0_0.distcp"):
        load_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def read_weights(folder: Path) -> list[torch.Tensor]:
    """Those of a checkpoint of `save`."""
    model = torch.nn.Linear(2, 2)
    load_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_resumed_run_leaves_the_checkpoint_that_it_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its first step fails: nothing new was learnt."""
    config = config_of(tmp_path, run__steps=2)
    trainer.train(world, config, quiet=True)
    path = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    written = (path / "flexcp.json").stat().st_mtime_ns
    monkeypatch.setattr(
        trainer.Engine, "__iter__", lambda self: (_ for _ in ()).throw(LossError("step 2 has loss nan"))
    )
    with pytest.raises(LossError):
        trainer.train(world, config_of(tmp_path, run__steps=3), resume=True, quiet=True)

    assert (path / "flexcp.json").stat().st_mtime_ns == written
    assert sorted(losses(tmp_path / "run")) == [0, 1]


def save(folder: Path, step: int, mark: int, keep: int = 2) -> Path:
    """A checkpoint of nearly nothing."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return save_checkpoint(folder, step, model, optimizer, {"mark": mark}, keep)


def test_a_checkpoint_stands_until_its_successor_does(world: World, tmp_path: Path) -> None:
    """Killed between the two renames, the old one is there; the next save clears up."""
    save(tmp_path, 3, mark=1)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == "step-00000003.tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 3, mark=2)

    assert [read_state(path)["mark"] for path in checkpoints(tmp_path)] == [1]
    save(tmp_path, 3, mark=4)
    assert [read_state(path)["mark"] for path in checkpoints(tmp_path)] == [4]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("name", ["step-00000003", "step-00000003.tmp", "step-00000003.old", "step-00000001"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_checkpoint_gives_way(world: World, tmp_path: Path, name: str, kind: str) -> None:
    """A plain file or a link, where one is to be written or cleared away."""
    save(tmp_path, 2, mark=2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "flexcp.json").write_text("{}")
    if kind == "file":
        (tmp_path / name).write_text("text")
    else:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    save(tmp_path, 3, mark=3)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere", "step-00000002", "step-00000003"]
    assert read_state(tmp_path / "step-00000003")["mark"] == 3
    assert (tmp_path / "elsewhere" / "flexcp.json").read_text() == "{}"


def test_the_last_checkpoint_stands_until_the_next_one_does(world: World, tmp_path: Path) -> None:
    """Room for one only, and a disk that is full in the middle of the second."""
    save(tmp_path, 1, mark=1, keep=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints_module, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(SaveError, match="of step 2 could not be written: rank 0: OSError: full"):
            save(tmp_path, 2, mark=2, keep=1)

    assert [read_state(path)["mark"] for path in checkpoints(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    save(tmp_path, 2, mark=3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "is not a FlexCP checkpoint ([Errno 2] No such file"),
        ("{", "is not a FlexCP checkpoint (Expecting property name"),
        ("[1]", "is not a FlexCP checkpoint (list indices"),
        ('{"step": 4}', "is not a FlexCP checkpoint ('schema')"),
        (
            '{"schema": "flexcp.checkpoint/2", "step": 4}',
            "has schema 'flexcp.checkpoint/2'; this version reads 'flexcp.checkpoint/1'",
        ),
    ],
)
def test_what_is_no_checkpoint_of_this_version_is_named(tmp_path: Path, text: str | None, cause: str) -> None:
    if text is not None:
        (tmp_path / "flexcp.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_state(tmp_path)

    assert caught.value.cause.startswith(f"{tmp_path} {cause}")


def test_a_run_goes_on_from_its_newest_checkpoint(world: World, tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save(tmp_path / "checkpoints", step, mark=step, keep=3)
    newest = trainer.checkpoint_to_resume(tmp_path, resume=True)

    assert newest is not None
    assert newest.name == "step-00000011"


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes it one goes first."""
    monkeypatch.setattr(checkpoints_module.shutil, "rmtree", lambda *_, **__: None)
    for step in (1, 2, 3):
        save(tmp_path, step, mark=step)

    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


def test_a_folder_that_cannot_be_made_is_a_sentence(world: World, tmp_path: Path) -> None:
    """On all ranks; it is rank 0 that makes it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made or written"):
        trainer.train(world, config_of(tmp_path, run__folder=tmp_path / "file" / "run"), quiet=True)


@pytest.mark.parametrize(
    ("longest", "words"), [(300, ""), (301, "if ranks are lost, those left (3) hold 300")]
)
def test_a_run_that_could_not_lose_a_rank_says_so(longest: int, words: str) -> None:
    """At its start, with what would help."""
    text = hopeless_notice(longest, 100, 3)

    assert words in text
    assert ("data.max_tokens" in text) == bool(words)
