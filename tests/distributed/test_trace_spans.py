"""Where the time of a step goes, as its ranks see it: who waits is seen to wait, for what, and where."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from flexcp.core.metrics import StepReport
from flexcp.core.trace import Span, TraceWriter, read_spans
from tests.distributed.test_engine import make_engine, make_planner
from tests.harness import run_ranks
from tests.models import ListDataset, tiny_model

LENGTHS = [90, 12, 80, 5]  # 90 and 80 tokens need both ranks
LATE_S, AT_LEAST_S = 1.0, 0.4  # a busy machine may keep the one who waits from coming early
LATE_TO_A_TASK, LATE_TO_THE_END = 1, 2  # steps


def meet_late(sign: Path, *, early: bool) -> None:
    """One rank leaves a sign and goes on; the other comes later than that by `LATE_S`."""
    if early:
        sign.touch()
        return
    while not sign.exists():
        time.sleep(0.01)
    time.sleep(LATE_S)


def train_with_a_late_rank(world: Any, folder: Path) -> list[StepReport]:
    """In one step rank 1 comes late to a task of both, in the next rank 0 to the reduction."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    model = tiny_model()
    model = shard(model, "fsdp2", blocks=blocks_of(model))
    reports = []
    with enable(model), TraceWriter(folder / f"rank-{world.rank}.jsonl") as trace:
        engine = make_engine(
            model, make_planner(2), ListDataset(LENGTHS, unlabelled=()), global_batch=4, steps=4, trace=trace
        )
        with engine:
            for step in engine:
                for micro in step:
                    if micro.task.degree == 2 and step.index == LATE_TO_A_TASK:
                        meet_late(folder / "task", early=world.rank == 0)
                    step.backward(model(**micro.inputs), micro)
                if step.index == LATE_TO_THE_END:
                    meet_late(folder / "end", early=world.rank == 1)
                reports.append(step.finish())
    return reports


def of(spans: list[Span], name: str, step: int) -> list[Span]:
    """Spans of one name in one step; there are some."""
    found = [span for span in spans if (span.name, span.step) == (name, step)]
    assert found, f"no span {name} in step {step}"
    return found


def test_who_waits_for_what_is_seen(tmp_path: Path) -> None:
    """Bounds from below and orders only: the machine may be as slow as it likes."""
    here, there = run_ranks(train_with_a_late_rank, 2, tmp_path)
    spans = [list(read_spans(tmp_path / f"rank-{rank}.jsonl")) for rank in range(2)]

    waits = of(spans[0], "ring wait", LATE_TO_A_TASK)
    longest = max(waits, key=lambda span: span.end_s - span.start_s)
    assert longest.end_s - longest.start_s > AT_LEAST_S
    tasks = of(spans[0], "task", LATE_TO_A_TASK)
    holder = [t for t in tasks if t.start_s <= longest.start_s and longest.end_s <= t.end_s]
    assert len(holder) == 1
    inside = [w for w in waits if holder[0].start_s <= w.start_s <= holder[0].end_s]
    seen_s = sum(wait.end_s - wait.start_s for wait in inside)
    assert holder[0].detail is not None
    assert seen_s <= holder[0].detail["ring_wait_s"] <= holder[0].end_s - holder[0].start_s
    details = [t.detail for rank in range(2) for t in of(spans[rank], "task", LATE_TO_A_TASK)]
    waited_s = sum(detail["ring_wait_s"] for detail in details if detail)
    assert here[LATE_TO_A_TASK].ring_wait_s == pytest.approx(waited_s / 2)
    assert waited_s > AT_LEAST_S

    late, waiting = (of(spans[rank], "reduce", LATE_TO_THE_END)[0] for rank in range(2))
    assert waiting.end_s - waiting.start_s > AT_LEAST_S
    report = here[LATE_TO_THE_END]
    assert report.reduce_s == pytest.approx(late.end_s - late.start_s)
    assert report.parts_s["idle"] > AT_LEAST_S
    assert min(report.idle_shares) * report.measured_s > AT_LEAST_S  # both: one comes late, one waits

    for mine, other in zip(here, there, strict=True):
        for name in ("ring_wait_s", "reduce_s", "gather_s", "idle_shares", "pairs", "measured_s"):
            assert getattr(mine, name) == getattr(other, name)
        assert mine.pairs == sum(tokens * (tokens + 1) // 2 for tokens in LENGTHS)
        assert mine.longest_tokens == 90
        assert sum(mine.idle_shares) / 2 == pytest.approx(mine.idle_share, abs=1e-3)
        for name in ("gather", "task", "reduce", "optimizer"):
            of(spans[0], name, mine.step)
