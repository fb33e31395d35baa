"""Writes the run folder of a simulated run: the files of `core.run_folder`, and the Perfetto timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from flexcp.core.errors import ConfigError
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import RunInfo, attempt_path, metrics_path, trace_path
from flexcp.core.trace import Span, read_spans, to_perfetto

_BUFFERED_SPANS = 200_000
# No viewer opens a timeline of more; the spans themselves are kept.
_TIMELINE_SPANS = 1_000_000


class SimulatedFolder:
    """A folder that is being written; use it as a context manager.

    Args:
        folder: made if missing; a measured run is never overwritten.
        info: what runs.

    Raises:
        ConfigError: it cannot be made, or it holds something else.
    """

    def __init__(self, folder: Path, info: RunInfo) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not an empty folder", "Name a new one, or remove it.")
        try:
            info.write(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be made ({error.strerror})", "Choose another one.") from error
        self._folder = folder
        self._spans: defaultdict[int, list[Span]] = defaultdict(list)
        self._buffered = self._written = 0

    def __enter__(self) -> SimulatedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flush()
        if self._written <= _TIMELINE_SPANS:
            paths = sorted(attempt_path(self._folder, 0).glob("rank-*.jsonl"))
            timeline = to_perfetto(span for path in paths for span in read_spans(path))
            (self._folder / "timeline.json").write_text(timeline, encoding="utf-8")

    def record(self, span: Span) -> None:
        """One span; files of ranks are opened one at a time, as there may be more than a process may open."""
        self._spans[span.rank].append(span)
        self._buffered += 1
        if self._buffered >= _BUFFERED_SPANS:
            self._flush()

    def step(self, report: StepReport) -> None:
        """The line of one step."""
        with metrics_path(self._folder).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.to_record()) + "\n")

    def _flush(self) -> None:
        for rank, spans in self._spans.items():
            with trace_path(self._folder, 0, rank).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(span), separators=(",", ":")) + "\n" for span in spans)
        self._written += self._buffered
        self._buffered = 0
        self._spans.clear()
