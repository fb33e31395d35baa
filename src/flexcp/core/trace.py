"""Who did what when: spans of one rank, one JSON object a line, and their Perfetto form.

Simulated and measured runs write the same records, so that one drawing serves both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flexcp.core.jsonl import number, read_lines, whole
from flexcp.core.plan import Plan, Task


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one rank.

    Attributes:
        name: what ran: `plan`, `data`, `task`, `reduce`, `optimizer`, …
        start_s, end_s: seconds since the start of the run, on that rank's own clock.
        step: step index, or -1 outside of steps.
        detail: small JSON values worth showing beside the span; those of a task are `task_detail`.
    """

    rank: int
    name: str
    start_s: float
    end_s: float
    step: int = -1
    detail: dict[str, Any] | None = None


def task_detail(plan: Plan, task: Task, rank: int) -> dict[str, Any]:
    """What the span of a task says of it on one rank: enough to draw prediction beside measurement.

    `samples` are ids, `tokens` their lengths, `rows` the tokens that this rank holds, `predicted_start_s`
    counts from the start of the step, `predicted_s` is the duration, `wave` as in the plan.
    """
    pack = plan.pack(task)
    return {
        "degree": task.degree,
        "samples": [sample.id for sample in pack],
        "tokens": [sample.tokens for sample in pack],
        "rows": plan.layout(task).rows(task.ranks.index(rank)),
        "predicted_start_s": task.start_s,
        "predicted_s": task.duration_s,
        "wave": task.wave,
    }


class TraceWriter:
    """Writes the spans of one rank to a new file; buffered, so that a span costs no system call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def write(self, span: Span) -> None:
        """Append one span."""
        self._file.write(json.dumps(asdict(span), separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Hand what is buffered to the operating system; called between steps."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_spans(path: Path) -> Iterator[Span]:
    """Spans of one file, in the order written; a last line that a killed rank left unfinished is dropped.

    Raises:
        InputError: another line is damaged; it is named.
    """
    return read_lines(path, _span)


def _span(record: dict[str, Any]) -> Span:
    span = Span(**record)
    whole(span.rank, "rank")
    whole(span.step, "step", -1)
    start_s = number(span.start_s, "start_s")
    number(span.end_s, "end_s", start_s)
    return span


def to_perfetto(spans: Iterable[Span]) -> str:
    """Chrome trace JSON, which ui.perfetto.dev and chrome://tracing open: one row per rank."""
    events: list[dict[str, Any]] = []
    ranks: set[int] = set()
    for span in spans:
        if span.rank not in ranks:
            ranks.add(span.rank)
            name = {"name": f"rank {span.rank}"}
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": span.rank, "args": name})
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": span.rank,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"step": span.step, **(span.detail or {})},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
