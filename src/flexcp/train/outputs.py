"""What a run shows and leaves behind: progress on the terminal, metrics, curves, a timeline.

Only rank 0 writes and draws; on the other ranks every method is silent.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import nn

from flexcp.core.errors import ConfigError, RunError
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import RunInfo, attempt_path, claim, drop_later, metrics_path
from flexcp.core.trace import read_spans, to_perfetto
from flexcp.cost.correction import FACTORS, Correction
from flexcp.planner import Planner
from flexcp.report.advice import advice, figures_of
from flexcp.report.summary import STEP_HEADER, step_line, summary
from flexcp.train.config import TrainConfig, to_json
from flexcp.train.corpus import Corpus
from flexcp.train.trackers import Tracker, make_trackers


class Outputs:
    """The run folder and the terminal.

    Args:
        config: the run; its folder is made if missing.
        first_step: where this run starts; what an earlier, longer attempt wrote from there on is dropped.
        rank: only rank 0 writes.
        shown: whether to draw on the terminal.
        alone: whether no other run may write to the folder meanwhile; an elastic run is not, as an attempt
            that was lost with its node may hold the lock for a while.

    Raises:
        ConfigError: the folder cannot be made or written, or another run writes to it.
    """

    def __init__(
        self, config: TrainConfig, first_step: int, *, rank: int, shown: bool, alone: bool = True
    ) -> None:
        self._config = config
        self._folder = folder = config.run.folder
        self._first = rank == 0
        self._console = Console(quiet=not shown, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and sys.stdout.isatty()),
            transient=True,
        )
        self._steps = config.run.steps
        self._first_step = first_step
        self._tasks: dict[str, TaskID] = {}
        self._reports: list[StepReport] = []
        self._correction: Correction | None = None
        self._info: RunInfo | None = None
        self._trackers: list[Tracker] = []
        self._lock: IO[str] | None = None
        if self._first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._lock = claim(folder) if alone else None
            except OSError as error:
                raise ConfigError(
                    f"run.folder {folder} cannot be made or written ({error.strerror})", "Choose another one."
                ) from error
            drop_later(folder, first_step)

    def __enter__(self) -> Outputs:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        with (
            self.in_a_sentence(),
            contextlib.ExitStack() as closing,
        ):  # each of them, whatever becomes of the others
            if error is not None:  # that is what the user must hear of
                closing.enter_context(contextlib.suppress(Exception))
            if self._lock is not None:
                closing.callback(self._lock.close)
            for tracker in self._trackers:
                closing.callback(tracker.close, failed=error is not None)

    @contextmanager
    def in_a_sentence(self) -> Iterator[None]:
        """A disk that is full, or a folder or terminal that is gone.

        Raises:
            RunError: in place of an OSError inside.
        """
        try:
            yield
        except OSError as error:
            place = os.fsdecode(error.filename) if error.filename else f"{self._folder} or the terminal"
            raise RunError(
                f"what the run has to show cannot be written to {place}: {error.strerror or error}",
                "Make room, or see who removed it; --resume goes on from the newest checkpoint.",
            ) from error

    def progress(self, what: str, done: int, total: int) -> None:
        """Long work before step 0."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, visible=done < total)

    def describe(self, corpus: Corpus, model: nn.Module, planner: Planner) -> None:
        """What is about to run; curves begin here.

        Raises:
            MissingExtraError, ConfigError: see `train.trackers`.
        """
        if not self._first:
            return
        (self._folder / "config.json").write_text(to_json(self._config))
        self._info = run_info(self._config, planner)
        self._info.write(self._folder, self._first_step)
        for tracker in make_trackers(self._config.run.trackers, self._folder, self._first_step):
            tracker.start(self._config.model_dump(mode="json"))
            self._trackers.append(tracker)
        lengths = corpus.train.lengths
        parameters = sum(parameter.numel() for parameter in model.parameters())
        cluster = planner.cluster
        self._console.print(
            f"[bold]{len(lengths)}[/] samples, {int(lengths.sum()):,} tokens, "
            f"longest {int(lengths.max()):,}; "
            f"model of {_count(parameters)} parameters; {cluster.ranks} ranks × "
            f"{cluster.tokens_per_rank:,} tokens; policy {planner.policy}",
            highlight=False,
        )
        for skipped in corpus.skipped:
            self._console.print(str(skipped), style="yellow", markup=False, highlight=False)
        if self._first_step:
            self._console.print(f"[cyan]resumed at step {self._first_step}[/]", highlight=False)
        self._console.print(STEP_HEADER, style="bold", highlight=False)

    def step(self, report: StepReport, lr: float, correction: Correction | None = None) -> None:
        """One finished step, and what has been learnt of the costs until its end."""
        self._reports.append(report)
        self.progress("training", report.step + 1, self._steps)
        if not self._first:
            return
        self._console.print(step_line(report), highlight=False)
        record = {**report.to_record(), "lr": lr}
        if correction is not None:
            self._correction = correction
            record["cost_factors"] = dict(zip(FACTORS, correction.factors, strict=True))
            self._log(
                report.step, {f"cost/{name}": factor for name, factor in record["cost_factors"].items()}
            )
        self._append(record)
        rates = ("loss", "grad_norm", "lr", "tokens_per_s", "gap", "idle_share", "mfu")
        times = ("predicted_s", "measured_s", "step_s", "plan_s")
        parts = {f"time/{name.replace(' ', '_')}_s": seconds for name, seconds in report.parts_s.items()}
        self._log(
            report.step,
            {f"train/{name}": record[name] for name in rates if record[name] is not None}
            | {f"time/{name}": record[name] for name in times}
            | parts,
        )

    def notice(self, text: str) -> None:
        """Something that the user should know and that stops nothing."""
        if self._first:
            self._console.print(text, style="yellow", markup=False, highlight=False)

    def evaluation(self, done: int, loss: float) -> None:
        """Loss on held-out samples after `done` steps."""
        if self._first:
            self._console.print(f"[cyan]evaluation after {done} steps: loss {loss:.4f}[/]", highlight=False)
            # As of a step: JSON has no number that is not finite.
            self._append({"evaluated_after": done, "eval_loss": loss if math.isfinite(loss) else None})
            self._log(done, {"eval/loss": loss})

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""
        self._console.print(f"saved {path}", style="dim", markup=False, highlight=False)

    def finish(self, eval_losses: dict[int, float]) -> None:
        """The table at the end, and the timeline file; call after all ranks have closed their traces."""
        if not self._first:
            return
        self._bar.stop()
        traces = sorted(attempt_path(self._folder, self._first_step).glob("rank-*.jsonl"))
        spans = (span for path in traces for span in read_spans(path))
        (self._folder / "timeline.json").write_text(to_perfetto(spans))
        if self._reports:
            self._conclude(eval_losses)
        board = f"  tensorboard --logdir {self._folder / 'tensorboard'}\n"
        self._console.print(
            f"run folder {self._folder}\n"
            f"{board if 'tensorboard' in self._config.run.trackers else ''}"
            f"  timeline.json opens in ui.perfetto.dev\n"
            f"  flexcp report {self._folder} makes one page of it",
            markup=False,
            highlight=False,
        )

    def _conclude(self, eval_losses: dict[int, float]) -> None:
        """What the run came to, where the time went, and what to do about it."""
        figures = figures_of(self._reports)
        learnt = dict(zip(FACTORS, self._correction.factors, strict=True)) if self._correction else {}
        self._console.print(summary(self._reports, eval_losses, figures, learnt))
        if self._info is not None:
            for text in advice(figures, self._info):
                self._console.print(Text("do: ", "green").append(text, "default"), highlight=False)
        values = {f"share/{name}": share for name, share in figures.parts.items()}
        values |= {"step_s": figures.step_s, "prediction_error": figures.error, "idle_share": figures.idle}
        values |= {} if figures.mfu is None else {"mfu": figures.mfu}
        for tracker in self._trackers:
            tracker.summary(values)

    def _append(self, record: dict[str, object]) -> None:
        with metrics_path(self._folder).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _log(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)


def run_info(config: TrainConfig, planner: Planner) -> RunInfo:
    """What reports must know of a run beside its steps."""
    model = config.model
    return RunInfo(
        origin="measured",
        model=str(model.config or f"{model.architecture}, {model.layers} layers of {model.hidden}"),
        hardware=config.parallel.hardware,
        policy=planner.policy,
        mode=planner.mode,
        cluster=planner.cluster,
        whole_below_tokens=planner.uncut_below_tokens,
        coefficients=asdict(planner.cost),
    )


def _count(number: int) -> str:
    """With the unit that leaves one to three digits before the point.

    >>> _count(25_408), _count(1_100_000), _count(8_190_000_000)
    ('25.4 K', '1.1 M', '8.2 B')
    """
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
