"""The run folder and the terminal: what is kept on resume, what is shown, and by whom."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import drop_later, read_info, read_reports, trace_path
from flexcp.core.trace import Span, TraceWriter
from flexcp.cost.model import CostModel, Link
from flexcp.planner import Planner
from flexcp.report.summary import STEP_HEADER, step_line
from flexcp.train.config import RunSection, TrainConfig
from flexcp.train.data import Skipped
from flexcp.train.outputs import Outputs


def report(step: int, loss: float) -> StepReport:
    return StepReport(
        step=step,
        loss=loss,
        grad_norm=1.5,
        tokens=2000,
        supervised_tokens=1990,
        degrees={1: 4, 3: 1},
        predicted_s=1.2,
        bound_s=1.0,
        measured_s=1.6,
        step_s=2.0,
        plan_s=0.004,
        exposed_s=0.05,
        idle_share=0.25,
        plan_wait_s=0.01,
        data_wait_s=0.04,
        pairs=1_000_000,
        longest_tokens=900,
        alone_s=1.0,
        predicted_idle_share=0.1,
        gather_s=0.06,
        ring_wait_s=0.4,
        reduce_s=0.1,
        optimizer_s=0.05,
        idle_shares=(0.5, 0.0),
        mfu=0.41,
    )


def run_steps(
    folder: Path, steps: range, total: int, *, rank: int = 0, shown: bool = False, eval_loss: float = 2.5
) -> None:
    """One attempt: steps, an evaluation at its end, a trace."""
    config = TrainConfig(run=RunSection(folder=folder, steps=total))
    with Outputs(config, steps.start, rank=rank, shown=shown) as outputs:
        with TraceWriter(trace_path(folder, steps.start, rank)) as trace:
            for step in steps:
                outputs.step(report(step, 5.0 - step), lr=0.1)
                trace.write(Span(rank, "task", step, step + 0.5, step))
        outputs.evaluation(steps.stop, eval_loss)
        outputs.finish({steps.stop: eval_loss})


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_of_later_steps_are_dropped_on_resume(tmp_path: Path) -> None:
    """D59: an attempt reached step 6, its newest checkpoint was of step 4."""
    run_steps(tmp_path, range(4), 8)
    run_steps(tmp_path, range(4, 7), 8)
    assert [record["step"] for record in metrics(tmp_path) if "step" in record] == [0, 1, 2, 3, 4, 5, 6]
    run_steps(tmp_path, range(4, 8), 8)
    records = metrics(tmp_path)

    assert [record["step"] for record in records if "step" in record] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [record["evaluated_after"] for record in records if "eval_loss" in record] == [4, 8]
    assert records[0]["loss"] == 5.0
    assert records[0]["gap"] == 1.2
    assert records[0]["tokens_per_s"] == 1000.0
    assert records[0]["lr"] == 0.1
    assert [report.step for report in read_reports(tmp_path)] == list(range(8))
    assert next(read_reports(tmp_path)) == report(0, 5.0)


def test_a_new_run_starts_with_empty_metrics(tmp_path: Path) -> None:
    """A run that failed before its first checkpoint leaves records behind."""
    run_steps(tmp_path, range(3), 3)
    run_steps(tmp_path, range(2), 2)

    assert [record["step"] for record in metrics(tmp_path) if "step" in record] == [0, 1]
    assert [record["evaluated_after"] for record in metrics(tmp_path) if "eval_loss" in record] == [2]


def test_a_full_disk_on_resume_keeps_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is written aside first: a whole run is in that file."""
    run_steps(tmp_path, range(3), 3)
    before, write_text = metrics(tmp_path), Path.write_text

    def write_half(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], **options)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        drop_later(tmp_path, 2)

    assert metrics(tmp_path) == before


def test_a_damaged_record_is_named_on_resume(tmp_path: Path) -> None:
    run_steps(tmp_path, range(3), 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 1,', '"step": 1;'))

    with pytest.raises(InputError, match=r"metrics.jsonl, line 2, is damaged .*\nCopy .* or remove the line"):
        drop_later(tmp_path, 2)


def test_an_evaluation_that_is_not_finite_leaves_a_folder_that_can_be_read(tmp_path: Path) -> None:
    """By `flexcp report`, and when the run goes on."""
    run_steps(tmp_path, range(2), 2, eval_loss=math.inf)

    assert [report.step for report in read_reports(tmp_path)] == [0, 1]
    run_steps(tmp_path, range(2, 3), 3)
    assert [record["eval_loss"] for record in metrics(tmp_path) if "eval_loss" in record] == [None, 2.5]


def test_the_summary_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_steps(tmp_path, range(2), 2, shown=True)
    text = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in text.splitlines()]

    assert "0 5.0000 1,000 1×4 3×1 1.20s 1.60s 1.200 25% 41% 50ms" in rows
    for row in (
        "loss, first → last │ 5.0000 → 4.0000",
        "evaluation loss after 2 │ 2.5000",
        "tokens/s │ 1,000",
        "degree×groups │ 1×8 3×2",
        "tasks of a step, predicted / measured │ 1.20 s / 1.60 s",
        "gap to the bound │ 1.200",
        "planning, mean │ 4 ms",
        "waited for the first plan and data │ 0.05 s",
        "MFU │ 41.0%",
        "plan │ 10.0 ms │ 0.5% │ │ │",
        "data │ 40.0 ms │ 2.0% │ │ │",
        "gather │ 60.0 ms │ 3.0% │ │ █ │",
        "compute │ 800 ms │ 40.0% │ 1.08 s │ ██████████ │",
        "ring wait │ 400 ms │ 20.0% │ │ █████ │",
        "idle │ 400 ms │ 20.0% │ 120 ms │ █████ │",
        "reduce │ 100 ms │ 5.0% │ │ █ │",
        "optimizer │ 50.0 ms │ 2.5% │ │ █ │",
        "other │ 140 ms │ 7.0% │ │ ██ │",
        "idle by rank: 0: 50%, 1: 0%",
    ):
        assert any(row in shown for shown in rows), f"{row} is not in\n{text}"
    assert f"run folder {tmp_path}" in text
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["task", "task"]


def test_a_step_is_a_line_of_80_columns() -> None:
    """As long as its groups are of few degrees; heads stand above their numbers."""
    line = step_line(report(3, 5.0))

    assert len(STEP_HEADER) == len(line) == 80
    assert line[:4] == "   3"
    for head, value in (("MFU", "41%"), ("idle", "25%"), ("wait", "50ms"), ("gap", "1.200")):
        assert STEP_HEADER.index(head) + len(head) == line.index(value) + len(value)


def test_what_is_about_to_run_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every reason for which data was left out."""
    skipped = (Skipped("empty", 2, ("a.txt", "b.txt")), Skipped("not text", 1, ("c.bin",)))
    corpus: Any = SimpleNamespace(train=SimpleNamespace(lengths=np.array([7, 1200])), skipped=skipped)
    link = Link(1e9, 1e-5)
    planner = Planner(Cluster(3, 4096), CostModel(1e-9, 1e-6, 0.0, 0.0, 0.0, 10.0, 2, link, link))
    config = TrainConfig(run=RunSection(folder=tmp_path, steps=9))
    with Outputs(config, 5, rank=0, shown=True) as outputs:
        outputs.describe(corpus, nn.Linear(1000, 1000), planner)
    text = capsys.readouterr().out

    assert "2 samples, 1,207 tokens, longest 1,200; model of 1.0 M parameters; " in text
    assert "3 ranks × 4,096 tokens; policy flexcp" in text
    assert "2 skipped, empty: a.txt, b.txt" in text
    assert "1 skipped, not text: c.bin" in text
    assert "resumed at step 5" in text
    assert json.loads((tmp_path / "config.json").read_text())["run"]["steps"] == 9
    info = read_info(tmp_path)
    assert (info.origin, info.policy, info.mode) == ("measured", "flexcp", "free-running")
    assert (info.cluster, info.whole_below_tokens) == (Cluster(3, 4096), 512)
    assert info.coefficients["pair_s"] == 1e-9


def test_other_ranks_neither_write_nor_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    run_steps(folder, range(2), 2, rank=1)

    assert capsys.readouterr().out == ""
    assert [path.name for path in folder.iterdir()] == ["trace"]
