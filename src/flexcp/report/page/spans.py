"""Reads the traces of a run once: totals of everything, and the tasks of a few steps in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexcp.core.errors import InputError
from flexcp.core.jsonl import ends_whole, number, readable, whole
from flexcp.core.run_folder import trace_path
from flexcp.core.trace import Span, read_spans
from flexcp.report.page.subject import LengthCounter, Mark


@dataclass(slots=True)
class SeenTask:
    """One task, put together from the spans of its ranks; seconds on their clocks.

    `ring_wait_s` is of the rank that waited longest for messages of the group.
    """

    degree: int
    samples: tuple[int, ...]
    tokens: tuple[int, ...]
    predicted_start_s: float
    predicted_s: float
    wave: int
    by_rank: dict[int, tuple[float, float]] = field(default_factory=dict)
    ring_wait_s: float = 0.0


class SeenStep:
    """Tasks and other spans of one step."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[tuple[int, ...], float], SeenTask] = {}
        self.marks: list[SeenMark] = []

    @property
    def tasks(self) -> list[SeenTask]:
        """In the order in which they were met."""
        return list(self._tasks.values())

    def add(self, span: Span) -> None:
        """One span of one rank."""
        detail = span.detail or {}
        if span.name == "ring wait":
            return  # inside of its task, whose span has the sum
        if span.name != "task":
            self.marks.append(SeenMark(span.rank, span.name, span.start_s, span.end_s))
            return
        # A batch that spans epochs may hold a sample twice, but never at the same time on the same ranks.
        key = (tuple(detail["samples"]), number(detail["predicted_start_s"], "predicted_start_s", 0.0))
        if key not in self._tasks:
            self._tasks[key] = SeenTask(
                degree=detail["degree"],
                samples=key[0],
                tokens=tuple(detail["tokens"]),
                predicted_start_s=key[1],
                predicted_s=number(detail["predicted_s"], "predicted_s", 0.0),
                wave=whole(detail["wave"], "wave"),
            )
        task = self._tasks[key]
        task.by_rank[span.rank] = (span.start_s, span.end_s)
        waited_s = number(detail.get("ring_wait_s", 0.0), "ring_wait_s", 0.0)  # simulated tasks have none
        task.ring_wait_s = max(task.ring_wait_s, waited_s)


class SeenMark(Mark):
    """A mark on the clock of its rank."""

    def shifted(self, seconds: float) -> Mark:
        """The same on another clock."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)


@dataclass
class Traces:
    """What the traces say.

    Attributes:
        steps: the steps asked for.
        rank_s: seconds per degree over all ranks, scaled up where not all were read.
        peak_rows: per rank, the most tokens it held at a time.
        whole: whether every rank was read.
    """

    steps: dict[int, SeenStep]
    whole: bool
    lengths: LengthCounter = field(default_factory=LengthCounter)
    rank_s: dict[int, float] = field(default_factory=dict)
    peak_rows: dict[int, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def read_traces(folder: Path, ranks: Sequence[int], steps: set[int]) -> Traces:
    """Read the spans of some ranks, of the latest attempt at every step.

    Raises:
        InputError: there are no traces, or a line is damaged or lacks what a task's span has.
    """
    attempts = _attempts(folder)
    scale = float(ranks[1] - ranks[0]) if len(ranks) > 1 else 1.0
    traces = Traces({step: SeenStep() for step in steps}, whole=scale == 1.0)
    missing: set[int] = set()
    for first_step, upto in zip(attempts, [*attempts[1:], None], strict=True):
        for rank in ranks:
            path = trace_path(folder, first_step, rank)
            with readable(path):
                there = path.is_file()
            if not there:
                missing.add(rank)
                continue
            if not ends_whole(path):
                traces.notices.append(f"{path.name} ends inside a line: what followed is not shown.")
            traces.peak_rows.setdefault(rank, 0)
            for span in read_spans(path):
                if span.step >= first_step and (upto is None or span.step < upto):
                    _count(traces, span, scale, path)
    if missing:
        traces.notices.append(f"Traces of {len(missing)} ranks are missing, the first is {min(missing)}.")
        traces.whole = False
    return traces


def latest_spans(folder: Path) -> Iterator[Span]:
    """All spans of the latest attempt, whose ranks share an origin of time.

    Raises:
        InputError: there are no traces, or a line is damaged.
    """
    last = trace_path(folder, _attempts(folder)[-1], 0).parent
    with readable(last):
        paths = sorted(last.iterdir())
    for path in paths:
        if path.match("rank-*.jsonl"):
            yield from read_spans(path)


def _attempts(folder: Path) -> list[int]:
    trace = folder / "trace"
    with readable(trace):  # a pattern would pass over a folder that cannot be read
        names = [path.name for path in trace.iterdir()] if trace.is_dir() else []
    ends = [name.removeprefix("from-step-") for name in names if name.startswith("from-step-")]
    numbers = sorted(int(end) for end in ends if end.isdecimal())
    if not numbers:
        raise InputError(
            f"{folder} has no trace folder, so nobody knows what ran where",
            "Copy the whole run folder; trace/ is written beside metrics.jsonl.",
        )
    return numbers


def _count(traces: Traces, span: Span, scale: float, path: Path) -> None:
    try:
        detail = span.detail or {}
        if span.name == "task":
            degree, rows = whole(detail["degree"], "degree", 1), whole(detail["rows"], "rows")
            tokens = [whole(length, "a length", 1) for length in detail["tokens"]]
            if len([whole(sample, "a sample") for sample in detail["samples"]]) != len(tokens):
                raise ValueError("samples, which are not as many as tokens")
        if span.step in traces.steps:
            traces.steps[span.step].add(span)
        if span.name != "task":
            return
        # Every rank of a group counts its share of the pack, so all together count it once.
        traces.lengths.add(tokens, scale / degree)
        seconds = scale * (span.end_s - span.start_s)
        traces.rank_s[degree] = traces.rank_s.get(degree, 0.0) + seconds
        traces.peak_rows[span.rank] = max(traces.peak_rows[span.rank], rows)
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: a task of step {span.step} lacks or garbles {error}",
            "Read it with the version of flexcp that wrote it, or run again.",
        ) from None
