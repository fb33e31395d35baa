"""Who did what when: spans of one rank, one JSON object a line, and their Perfetto form.

Simulated and measured runs write the same records, so that one drawing serves both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flexcp.core.errors import LengthsError, RunError
from flexcp.core.jsonl import number, read_lines, whole
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one rank.

    Attributes:
        name: what ran: `plan`, `data`, `gather`, `task`, inside of it `ring wait`, `reduce`, `optimizer`, …
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
    counts from the start of the step, `predicted_s` is the duration, `wave` as in the plan. `spans` and
    `encoder_pairs`, of every sample as in `core.sample.Sample`, are there where some sample has any.
    """
    pack = plan.pack(task)
    more: dict[str, Any] = {}
    if any(sample.spans for sample in pack):
        more["spans"] = [sample.spans for sample in pack]
    if any(sample.encoder_pairs for sample in pack):
        more["encoder_pairs"] = [sample.encoder_pairs for sample in pack]
    return {
        "degree": task.degree,
        "samples": [sample.id for sample in pack],
        "tokens": [sample.tokens for sample in pack],
        **more,
        "rows": plan.layout(task).rows(task.ranks.index(rank)),
        "predicted_start_s": task.start_s,
        "predicted_s": task.duration_s,
        "wave": task.wave,
    }


def pack_of(detail: Mapping[str, Any]) -> tuple[Sample, ...]:
    """The samples of a task from its `task_detail`, as JSON carried it.

    >>> pack_of({"samples": [7, 8], "tokens": [4, 5], "spans": [[[1, 3]], []]})[0]
    Sample(id=7, tokens=4, spans=((1, 3),), encoder_pairs=0)

    Raises:
        KeyError, TypeError, ValueError: a part is missing or misshapen.
    """
    ids = [whole(sample, "a sample") for sample in detail["samples"]]
    tokens = [whole(length, "a length", 1) for length in detail["tokens"]]
    spans = detail.get("spans") or [()] * len(ids)
    encoder_pairs = [whole(pairs, "encoder_pairs") for pairs in detail.get("encoder_pairs") or [0] * len(ids)]
    if not len(ids) == len(tokens) == len(spans) == len(encoder_pairs):
        raise ValueError("samples, which are not as many as tokens, spans or encoder_pairs")
    try:
        return tuple(
            Sample(index, length, tuple((whole(a, "a span"), whole(b, "a span")) for a, b in some), pairs)
            for index, length, some, pairs in zip(ids, tokens, spans, encoder_pairs, strict=True)
        )
    except LengthsError as error:
        raise ValueError(error.cause) from None


_MAKE_ROOM = "Make room on the disk, then go on from the newest checkpoint."


class TraceWriter:
    """Writes the spans of one rank to a new file, from a thread: a span costs no system call.

    Spans are kept in memory until `flush`; a rank that is killed leaves those of whole steps behind.

    Raises:
        RunError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise RunError(f"the trace {path} cannot be written: {error}", _MAKE_ROOM) from error
        self._spans: list[Span] = []
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "flexcp-trace")
        self._writing: list[Future[None]] = []

    def write(self, span: Span) -> None:
        """Keep one span."""
        self._spans.append(span)

    def flush(self) -> None:
        """Have the spans so far written; called between steps, returns at once.

        Raises:
            RunError: those of an earlier call could not be written.
        """
        written = [part for part in self._writing if part.done()]
        self._writing = [part for part in self._writing if part not in written]
        self._raise_trouble(written)
        spans, self._spans = self._spans, []
        self._writing.append(self._thread.submit(self._append, spans))

    def close(self) -> None:
        """Write what is left and close; may be called twice.

        Raises:
            RunError: something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._writing.append(self._thread.submit(self._append, self._spans))
        self._writing.append(self._thread.submit(self._file.close))
        self._thread.shutdown()
        self._raise_trouble(self._writing)

    def _append(self, spans: list[Span]) -> None:
        lines = [json.dumps(asdict(span), separators=(",", ":")) + "\n" for span in spans]
        self._file.writelines(lines)
        self._file.flush()

    def _raise_trouble(self, written: list[Future[None]]) -> None:
        error = next((part.exception() for part in written if part.exception()), None)
        if error is None:
            return
        remedy = _MAKE_ROOM
        if not isinstance(error, OSError):
            remedy = "Give a span details that JSON has: text, numbers, lists and mappings of them."
        raise RunError(f"the trace {self._file.name} cannot be written: {error}", remedy) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RunError:
            if error is None:  # else that is what the user must hear of
                raise


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
