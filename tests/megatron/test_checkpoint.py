"""FlexCP's state inside a checkpoint of Megatron's: the run goes on to the bit; and its run folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexcp.cli import main
from flexcp.core.errors import ConfigError
from flexcp.core.run_folder import read_info, read_reports, trace_path
from flexcp.core.trace import read_spans
from tests.datasets import ListDataset
from tests.harness import run_ranks
from tests.megatron.jobs import LENGTHS, make_planner, start

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )

STEPS, SAVED = 5, 2


def save_and_resume(world: Any, folder: str, tensor: int, pipeline: int) -> dict[str, Any]:
    """Five steps, and the last three of them again from what was saved after two."""
    start(world, tensor, pipeline)
    from megatron.core import dist_checkpointing

    import flexcp
    from tests.megatron import host

    def build() -> tuple[Any, Any, Any]:
        ddp, optimizer = host.wrap(host.provider(host.make_config()))
        device = flexcp.hardware("cpu").cell(tensor, pipeline)
        cost = flexcp.cost_model(
            flexcp.megatron.shape_of(ddp.module.config, host.PADDED_VOCAB, tied=True), device
        )
        mode = "lockstep" if pipeline > 1 else "free-running"
        planner = flexcp.Planner(flexcp.megatron.cluster(96), cost, mode=mode, whole_below_tokens=16)
        engine = flexcp.megatron.Engine(
            [ddp],
            planner,
            ListDataset(LENGTHS),
            global_batch=7,
            steps=STEPS,
            folder=Path(folder) / "run",
            learn_costs=True,
        )
        return ddp, optimizer, engine

    def state(ddp: Any, optimizer: Any, engine: Any, loading: bool) -> dict[str, Any]:
        weights = ddp.module.sharded_state_dict()
        own = optimizer.sharded_state_dict(weights, is_loading=loading)
        return {"model": weights, "optimizer": own, "flexcp": engine.state_dict()}

    def watched(engine: Any, saving: Any = None) -> Any:
        for step in engine:
            digests.append(step.plan.digest)
            yield step
            if saving and engine.next_step == SAVED:
                dist_checkpointing.save(state(*saving, engine, False), checkpoint)

    checkpoint, found = f"{folder}/checkpoint", {}
    if world.rank == 0:
        Path(checkpoint).mkdir()
    digests: list[str] = []
    ddp, optimizer, engine = build()
    with engine:
        losses, _ = host.train(watched(engine, (ddp, optimizer)), ddp, optimizer)
    found["unbroken"] = losses[SAVED:], digests[SAVED:], _bytes(ddp)

    digests.clear()
    ddp, optimizer, engine = build()
    for parameter in ddp.module.parameters():
        parameter.data.add_(1.0)  # nothing of a fresh model may be left
    with engine:
        loaded = dist_checkpointing.load(state(ddp, optimizer, engine, True), checkpoint)
        ddp.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        engine.load_state_dict(loaded["flexcp"])
        found["state"] = loaded["flexcp"]
        losses, _ = host.train(watched(engine), ddp, optimizer)
    found["resumed"] = losses, list(digests), _bytes(ddp)

    try:
        flexcp.megatron.Engine(
            [ddp], make_planner(engine.grid.cells), ListDataset(LENGTHS), global_batch=7, folder=Path(folder)
        )
    except ConfigError as error:
        found["own planner"] = str(error)
    return found


def _bytes(ddp: Any) -> list[bytes]:
    return [np.asarray(p.detach().numpy()).tobytes() for p in ddp.module.parameters()]


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)],
    ids=["pipeline", "tensor"],
)
def test_a_run_goes_on_to_the_bit(tmp_path: Path, tensor: int, pipeline: int, capsys: Any) -> None:
    """Losses, plans and weights of the steps behind a checkpoint; `flexcp report` reads the folder."""
    by_process = run_ranks(save_and_resume, 4, str(tmp_path), tensor, pipeline)

    for found in by_process:
        assert found["resumed"] == found["unbroken"]
        assert len(found["resumed"][0]) == STEPS - SAVED
        assert found["state"]["step"] == SAVED
        assert set(found["state"]["learnt_costs"]) == {"0", "1"}
        assert found["state"] == by_process[0]["state"]
        assert "a MixedPlanner predicts no times" in found["own planner"]
    folder = tmp_path / "run"
    info, reports = read_info(folder), list(read_reports(folder))
    assert (info.origin, info.cluster.ranks, info.mode) == (
        "measured",
        2,
        "lockstep" if pipeline > 1 else "free-running",
    )
    assert [report.step for report in reports] == list(range(STEPS))
    assert [report.loss for report in reports[SAVED:]] == by_process[0]["resumed"][0]
    for report in reports:
        assert 0 < report.measured_s < report.step_s
        assert 0 <= report.idle_share < 1
        assert report.predicted_s > 0
    tasks = [span for span in read_spans(trace_path(folder, SAVED, 1)) if span.name == "task"]
    assert {span.step for span in tasks} == set(range(SAVED, STEPS))
    assert all(span.end_s > span.start_s and span.rank == 1 for span in tasks)
    assert main(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    assert "<svg" in (tmp_path / "report.html").read_text()
