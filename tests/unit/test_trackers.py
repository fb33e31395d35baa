"""Where curves go: TensorBoard's files, wandb's calls, and neither imported unless asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.unit.test_outputs import report
from torch import nn

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, MissingExtraError, RunError
from flexcp.core.run_folder import claim
from flexcp.cost.model import CostModel, Link
from flexcp.planner import Planner
from flexcp.train.config import RunSection, TrainConfig
from flexcp.train.outputs import Outputs
from flexcp.train.trackers import TensorBoard, WeightsAndBiases

LINK = Link(1e9, 1e-5)
PLANNER = Planner(Cluster(3, 4096), CostModel(1e-9, 1e-6, 0.0, 0.0, 0.0, 10.0, 2, LINK, LINK))
CORPUS: Any = SimpleNamespace(train=SimpleNamespace(lengths=np.array([7, 1200])), skipped=())


class FakeWandb(ModuleType):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.summary = SimpleNamespace(update=lambda values: self.calls.append(("summary", values)))

    def init(self, **options: Any) -> FakeWandb:
        self.calls.append(("init", options))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """In place of the real one, installed or not."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def run(folder: Path, *trackers: Any, rank: int = 0, steps: int = 2) -> None:
    """Two steps and an evaluation."""
    config = TrainConfig(run=RunSection(folder=folder, steps=steps, trackers=trackers))
    with Outputs(config, 0, rank=rank, shown=False) as outputs:
        outputs.describe(CORPUS, nn.Linear(2, 2), PLANNER)
        for step in range(steps):
            outputs.step(report(step, 5.0 - step), lr=0.1)
        outputs.evaluation(steps, 2.5)
        outputs.finish({steps: 2.5})


def test_wandb_is_told_everything_once(tmp_path: Path, wandb: FakeWandb) -> None:
    run(tmp_path / "first", "wandb")

    assert [name for name, _ in wandb.calls] == ["init", "log", "log", "log", "summary", "finish"]
    told = [told for _, told in wandb.calls]
    assert told[0]["config"]["run"]["steps"] == 2
    assert (told[0]["name"], told[0]["group"], told[0]["dir"]) == ("first", "first", str(tmp_path / "first"))
    step, values = told[2]
    assert step == 1
    assert (values["train/loss"], values["train/mfu"], values["train/lr"]) == (4.0, 0.41, 0.1)
    assert (values["time/ring_wait_s"], values["time/compute_s"]) == (0.4, pytest.approx(0.8))
    assert told[3] == (2, {"eval/loss": 2.5})
    assert (told[4]["mfu"], told[4]["share/ring wait"]) == (pytest.approx(0.41), pytest.approx(0.2))
    assert told[5] == 0
    assert not (tmp_path / "first" / "tensorboard").exists()


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 5.0), (1, 4.0)]
    assert [event.value for event in events.Scalars("train/mfu")] == pytest.approx([0.41, 0.41])
    assert [event.value for event in events.Scalars("time/reduce_s")] == pytest.approx([0.1, 0.1])
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(2, 2.5)]
    assert "| mfu | 0.41 |" in str(events.Tensors("summary/text_summary")[0].tensor_proto.string_val)
    assert '"steps": 2' in str(events.Tensors("config/text_summary")[0].tensor_proto.string_val)


def test_tensorboard_hides_an_attempt_that_left_no_checkpoint(tmp_path: Path) -> None:
    """The next one begins at step 0 again, in the same folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (3, 2):
        run(tmp_path, "tensorboard", steps=steps)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()

    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 5.0), (1, 4.0)]
    assert [event.step for event in events.Scalars("eval/loss")] == [2]


def test_only_rank_0_has_trackers(tmp_path: Path, wandb: FakeWandb) -> None:
    run(tmp_path, "wandb", "tensorboard", rank=1)

    assert wandb.calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_told_as_failed(tmp_path: Path, wandb: FakeWandb) -> None:
    config = TrainConfig(run=RunSection(folder=tmp_path, steps=2, trackers=("wandb",)))

    def fail() -> None:
        with Outputs(config, 0, rank=0, shown=False) as outputs:
            outputs.describe(CORPUS, nn.Linear(2, 2), PLANNER)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [name for name, _ in wandb.calls] == ["init", "finish"]
    assert wandb.calls[-1] == ("finish", 1)


@pytest.mark.parametrize("failed", [True, False])
def test_a_tracker_that_does_not_close_hides_nothing(tmp_path: Path, failed: bool) -> None:
    """Neither why the run failed nor, where it did not, that curves are missing; and the other one closes."""

    class Stuck(FakeTracker):
        def close(self, failed: bool) -> None:
            super().close(failed)
            raise ConnectionError("no network")

    trackers = [Stuck(), FakeTracker(), Stuck()]
    config = TrainConfig(run=RunSection(folder=tmp_path, trackers=()))

    def end() -> None:
        with Outputs(config, 0, rank=0, shown=False) as outputs:
            outputs._trackers = list(trackers)
            if failed:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if failed else RunError):
        end()
    assert [tracker.closed for tracker in trackers] == [[failed]] * 3
    claim(tmp_path).close()  # the folder is free again


class FakeTracker:
    """Remembers how it was closed."""

    def __init__(self) -> None:
        self.closed: list[bool] = []

    def start(self, config: Any) -> None: ...

    def log(self, step: int, values: Any) -> None: ...

    def summary(self, values: Any) -> None: ...

    def close(self, failed: bool) -> None:
        self.closed.append(failed)


def test_curves_that_cannot_be_written_are_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard writes from a thread, which would show a trace of its own."""
    config = TrainConfig(run=RunSection(folder=tmp_path, trackers=("tensorboard",)))
    before = threading.excepthook
    curves = TensorBoard(tmp_path / "tensorboard", 0)

    def write() -> None:
        with Outputs(config, 0, rank=0, shown=False) as outputs:
            curves.start({})
            outputs._trackers = [curves]
            shutil.rmtree(tmp_path / "tensorboard")
            with outputs.in_a_sentence():
                for step in range(10_000):
                    curves.log(step, {"train/loss": 1.0})
                    curves._writer.flush()

    with pytest.raises(RunError, match=rf"cannot be written to {tmp_path}/tensorboard/.*: No such file"):
        write()

    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is before


def test_what_wandb_lacks_is_said(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed: how to install it; not logged in: how to log in, or do without."""

    def refuse(**_options: Any) -> FakeWandb:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"wandb does not start: api_key not.*\n.*WANDB_MODE=offline"):
        WeightsAndBiases(tmp_path).start({})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"wandb is not installed.*\npip install 'flexcp\[wandb\]'"):
        WeightsAndBiases(tmp_path).start({})


def test_a_missing_tracker_is_found_before_any_rank_starts(tmp_path: Path) -> None:
    """Also where the other one is there."""
    (tmp_path / "run.toml").write_text(
        f'[run]\ntrackers = ["tensorboard", "wandb"]\nfolder = "{tmp_path}/run"\n'
    )
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "wandb":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from flexcp.cli import main
code = main(["train", {str(tmp_path / "run.toml")!r}])
assert "torch" not in sys.modules
sys.exit(code)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert process.returncode == 2, process.stderr
    assert "pip install 'flexcp[wandb]'" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "run").exists()


def test_no_tracker_is_imported_unasked(tmp_path: Path) -> None:
    """In an interpreter of its own: others here have imported them."""
    code = f"""
import sys
from pathlib import Path
from tests.unit.test_trackers import run
run(Path({str(tmp_path)!r}))
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("wandb", "tensorboard")))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[]"
