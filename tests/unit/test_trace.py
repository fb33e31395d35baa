"""Spans reach their file in order, from a thread, and what cannot be written is said."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from flexcp.core import trace
from flexcp.core.errors import RunError
from flexcp.core.trace import Span, TraceWriter, read_spans

SPANS = [Span(0, "task", float(index), index + 0.5, index) for index in range(100)]


def test_spans_come_back_in_order(tmp_path: Path) -> None:
    """Of many flushes, and those after the last one."""
    with TraceWriter(tmp_path / "deep" / "rank-0.jsonl") as writer:
        for span in SPANS:
            writer.write(span)
            if span.step % 7 == 0:
                writer.flush()

    assert list(read_spans(tmp_path / "deep" / "rank-0.jsonl")) == SPANS


def test_a_slow_disk_does_not_hold_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every span is turned into text and written while the step goes on: here, after it has."""
    gone_on, dumps = threading.Event(), trace.json.dumps

    def slow(*args: Any, **options: Any) -> str:
        assert gone_on.wait(60), "the step waits for the disk"
        return dumps(*args, **options)

    monkeypatch.setattr(trace.json, "dumps", slow)
    with TraceWriter(tmp_path / "rank-0.jsonl") as writer:
        for span in SPANS:
            writer.write(span)
            writer.flush()
        gone_on.set()
    assert list(read_spans(tmp_path / "rank-0.jsonl")) == SPANS


def test_flushed_spans_survive_the_process(tmp_path: Path) -> None:
    """The spans of whole steps are in the file though nobody closed it."""
    path = tmp_path / "rank-0.jsonl"
    writer = TraceWriter(path)
    writer.write(SPANS[0])
    writer.flush()
    writer.write(SPANS[1])
    end_s = time.monotonic() + 60
    while not path.read_text():
        assert time.monotonic() < end_s
        time.sleep(0.01)

    assert list(read_spans(path)) == SPANS[:1]
    writer.close()
    assert list(read_spans(path)) == SPANS[:2]


def test_a_full_disk_is_said_and_hides_no_other_error() -> None:
    """Between steps, at the latest when the trace is closed."""
    writer = TraceWriter(Path("/dev/full"))
    writer.write(SPANS[0])
    with pytest.raises(RunError, match=r"trace /dev/full cannot be written: .*No space left"):
        writer.close()

    def fail() -> None:
        with TraceWriter(Path("/dev/full")) as writer:
            writer.write(SPANS[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    """Here its folder is a file."""
    (tmp_path / "trace").write_text("")
    with pytest.raises(RunError, match=r"trace .*/trace/rank-0.jsonl cannot be written: .*\nMake room"):
        TraceWriter(tmp_path / "trace" / "rank-0.jsonl")


@pytest.mark.parametrize("flushes", [0, 1, 2])
def test_spans_that_cannot_be_written_are_never_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushes: int
) -> None:
    """Whichever part they are in, and though later parts are given before it fails; the others are there."""
    given, dumps = threading.Event(), trace.json.dumps

    def wait(*args: Any, **options: Any) -> str:
        assert given.wait(60)
        return dumps(*args, **options)

    monkeypatch.setattr(trace.json, "dumps", wait)
    writer = TraceWriter(tmp_path / "rank-0.jsonl")
    writer.write(Span(0, "own", 0.0, 1.0, detail={"what": object()}))
    for index in range(flushes):
        writer.flush()
        writer.write(SPANS[index])
    given.set()
    with pytest.raises(RunError, match=r"rank-0.jsonl cannot be written: .*not JSON.*\nGive a span details"):
        writer.close()

    assert list(read_spans(tmp_path / "rank-0.jsonl")) == SPANS[:flushes]
    writer.close()
