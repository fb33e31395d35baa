"""Reads the traces of a run once: totals of everything, and the tasks of a few steps in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flexcp.core.errors import InputError
from flexcp.core.jsonl import ends_whole, number, readable, whole
from flexcp.core.run_folder import Attempt, attempt_path, read_attempts, trace_path
from flexcp.core.sample import Sample
from flexcp.core.trace import Span, pack_of, read_spans
from flexcp.report.page.limits import MOST_RANK_FILES
from flexcp.report.page.subject import LengthCounter, Mark
from flexcp.report.scales import shown_ranks


@dataclass(slots=True)
class SeenTask:
    """One task, put together from the spans of its ranks; seconds on their clocks.

    `ring_wait_s` is of the rank that waited longest for messages of the group.
    """

    degree: int
    pack: tuple[Sample, ...]
    predicted_start_s: float
    predicted_s: float
    wave: int
    by_rank: dict[int, tuple[float, float]] = field(default_factory=dict)
    ring_wait_s: float = 0.0


class SeenStep:
    """Tasks and other spans of one step; `whole` if all ranks of it were read."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[tuple[Sample, ...], float], SeenTask] = {}
        self.marks: list[SeenMark] = []
        self.whole = False

    @property
    def tasks(self) -> list[SeenTask]:
        """In the order in which they were met."""
        return list(self._tasks.values())

    def add(self, span: Span, pack: tuple[Sample, ...]) -> None:
        """One span of one rank; `pack` is of its task."""
        detail = span.detail or {}
        if span.name == "ring wait":
            return  # inside of its task, whose span has the sum
        if span.name != "task":
            self.marks.append(SeenMark(span.rank, span.name, span.start_s, span.end_s))
            return
        # A batch that spans epochs may hold a sample twice, but never at the same time on the same ranks.
        key = (pack, number(detail["predicted_start_s"], "predicted_start_s", 0.0))
        if key not in self._tasks:
            self._tasks[key] = SeenTask(
                degree=detail["degree"],
                pack=pack,
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
        peak_rows: per rank, the most tokens it held at a time; of attempts with the budget of the newest.
        notices: what is missing.
    """

    steps: dict[int, SeenStep]
    lengths: LengthCounter = field(default_factory=LengthCounter)
    rank_s: dict[int, float] = field(default_factory=dict)
    peak_rows: dict[int, int] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def read_traces(folder: Path, attempts: Sequence[Attempt], steps: set[int]) -> Traces:
    """Read the spans of every attempt as far as no later one took over; of many ranks, those of some.

    Raises:
        InputError: a line is damaged or lacks what a task's span has.
    """
    traces = Traces({step: SeenStep() for step in steps})
    for attempt in attempts:
        cluster = attempt.info.cluster
        ranks = shown_ranks(cluster.ranks, MOST_RANK_FILES)
        budgeted = cluster.tokens_per_rank == attempts[-1].info.cluster.tokens_per_rank
        missing = [rank for rank in ranks if not _read_rank(folder, attempt, rank, ranks, budgeted, traces)]
        for step in filter(attempt.covers, steps):
            traces.steps[step].whole = not missing and len(ranks) == cluster.ranks
        if missing:
            since = f" from step {attempt.first_step} on" if len(attempts) > 1 else ""
            traces.notices.append(
                f"Traces of {len(missing)} ranks are missing{since}, the first is {missing[0]}."
            )
    return traces


def _read_rank(
    folder: Path, attempt: Attempt, rank: int, ranks: Sequence[int], budgeted: bool, traces: Traces
) -> bool:
    """Take in the spans of one rank; whether it left any file."""
    path = trace_path(folder, attempt.first_step, rank)
    with readable(path):
        there = path.is_file()
    if not there:
        return False
    if not ends_whole(path):
        traces.notices.append(f"{path.name} ends inside a line: what followed is not shown.")
    scale = float(ranks[1] - ranks[0]) if len(ranks) > 1 else 1.0
    rows = [_count(traces, span, scale, path) for span in read_spans(path) if attempt.covers(span.step)]
    if budgeted:
        traces.peak_rows[rank] = max(traces.peak_rows.get(rank, 0), *rows, 0)
    return True


def latest_spans(folder: Path) -> Iterator[Span]:
    """All spans of the latest attempt, whose ranks share an origin of time.

    Raises:
        InputError: there are no traces, or a line is damaged.
    """
    last = attempt_path(folder, read_attempts(folder)[-1].first_step)
    with readable(last):
        paths = sorted(last.iterdir())
    for path in paths:
        if path.match("rank-*.jsonl"):
            yield from read_spans(path)


def _count(traces: Traces, span: Span, scale: float, path: Path) -> int:
    """Take in one span; the tokens that its task held on its rank, 0 of other spans."""
    try:
        detail = span.detail or {}
        degree = rows = 0
        pack: tuple[Sample, ...] = ()
        if span.name == "task":
            degree, rows = whole(detail["degree"], "degree", 1), whole(detail["rows"], "rows")
            pack = pack_of(detail)
        if span.step in traces.steps:
            traces.steps[span.step].add(span, pack)
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: a task of step {span.step} lacks or garbles {error}",
            "Read it with the version of flexcp that wrote it, or run again.",
        ) from None
    if span.name == "task":
        # Every rank of a group counts its share of the pack, so all together count it once.
        traces.lengths.add((sample.tokens for sample in pack), scale / degree)
        seconds = scale * (span.end_s - span.start_s)
        traces.rank_s[degree] = traces.rank_s.get(degree, 0.0) + seconds
    return rows
