"""What a run shows and leaves behind: progress on the terminal, metrics, TensorBoard events, a timeline.

Only rank 0 writes and draws; on the other ranks every method is silent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from flexcp.core.errors import ConfigError
from flexcp.core.layout import default_whole_below_tokens
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import RunInfo, metrics_path, trace_path
from flexcp.core.trace import read_spans, to_perfetto
from flexcp.cost.correction import TERMS, Correction
from flexcp.planner import Planner
from flexcp.report.tables import format_degrees
from flexcp.train.config import TrainConfig, to_json
from flexcp.train.corpus import Corpus


class Outputs:
    """The run folder and the terminal.

    Args:
        folder: the run folder; made if missing.
        steps: steps of the whole run.
        first_step: where this run starts; what an earlier, longer attempt wrote from there on is dropped.
        rank: only rank 0 writes.
        shown: whether to draw on the terminal.
    """

    def __init__(self, folder: Path, steps: int, first_step: int, *, rank: int, shown: bool) -> None:
        self._folder = folder
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
        self._steps = steps
        self._first_step = first_step
        self._tasks: dict[str, TaskID] = {}
        self._reports: list[StepReport] = []
        self._correction: Correction | None = None
        self._board = None
        if self._first:
            from torch.utils.tensorboard import SummaryWriter

            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"run.folder {folder} cannot be made ({error.strerror})", "Choose another one."
                ) from error
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step or None)
            _drop_metrics(metrics_path(folder), first_step)

    def __enter__(self) -> Outputs:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._board is not None:
            self._board.close()

    def progress(self, what: str, done: int, total: int) -> None:
        """Long work before step 0."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, visible=done < total)

    def describe(self, config: TrainConfig, corpus: Corpus, model: nn.Module, planner: Planner) -> None:
        """What is about to run."""
        if not self._first:
            return
        (self._folder / "config.json").write_text(to_json(config))
        run_info(config, planner).write(self._folder)
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
        self._console.print(_HEADER, style="bold", highlight=False)

    def step(self, report: StepReport, lr: float, correction: Correction | None = None) -> None:
        """One finished step, and what has been learnt of the costs until its end."""
        self._reports.append(report)
        self.progress("training", report.step + 1, self._steps)
        if not self._first:
            return
        self._console.print(_line(report), highlight=False)
        record = {**report.to_record(), "lr": lr}
        if correction is not None:
            self._correction = correction
            record["cost_factors"] = dict(zip(TERMS, correction.factors, strict=True))
            for name, factor in record["cost_factors"].items():
                self._scalar(f"cost/{name}", factor, report.step)
        self._append(record)
        for name in ("loss", "grad_norm", "lr", "tokens_per_s", "gap", "idle_share"):
            self._scalar(f"train/{name}", record[name], report.step)
        for name in ("predicted_s", "measured_s", "step_s", "plan_s", "plan_wait_s", "data_wait_s"):
            self._scalar(f"time/{name}", record[name], report.step)

    def notice(self, text: str) -> None:
        """Something that the user should know and that stops nothing."""
        if self._first:
            self._console.print(text, style="yellow", markup=False, highlight=False)

    def evaluation(self, done: int, loss: float) -> None:
        """Loss on held-out samples after `done` steps."""
        if self._first:
            self._console.print(f"[cyan]evaluation after {done} steps: loss {loss:.4f}[/]", highlight=False)
            self._append({"evaluated_after": done, "eval_loss": loss})
            self._scalar("eval/loss", loss, done)

    def saved(self, path: Path) -> None:
        """A checkpoint was written."""
        self._console.print(f"saved {path}", style="dim", markup=False, highlight=False)

    def finish(self, eval_losses: dict[int, float]) -> None:
        """The table at the end, and the timeline file; call after all ranks have closed their traces."""
        if not self._first:
            return
        self._bar.stop()
        traces = sorted(trace_path(self._folder, self._first_step, 0).parent.glob("rank-*.jsonl"))
        spans = (span for path in traces for span in read_spans(path))
        (self._folder / "timeline.json").write_text(to_perfetto(spans))
        if self._reports:
            self._console.print(_summary(self._reports, eval_losses, self._correction))
        self._console.print(
            f"run folder {self._folder}\n"
            f"  tensorboard --logdir {self._folder / 'tensorboard'}\n"
            f"  timeline.json opens in ui.perfetto.dev\n"
            f"  flexcp report {self._folder} makes one page of it",
            markup=False,
            highlight=False,
        )

    def _append(self, record: dict[str, object]) -> None:
        with metrics_path(self._folder).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _scalar(self, name: str, value: object, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def run_info(config: TrainConfig, planner: Planner) -> RunInfo:
    """What reports must know of a run beside its steps."""
    model = config.model
    whole_below_tokens = planner.whole_below_tokens
    if whole_below_tokens is None:
        whole_below_tokens = default_whole_below_tokens(planner.cluster.tokens_per_rank)
    return RunInfo(
        origin="measured",
        model=str(model.config or f"{model.architecture}, {model.layers} layers of {model.hidden}"),
        hardware=config.parallel.hardware,
        policy=planner.policy,
        mode=planner.mode,
        cluster=planner.cluster,
        whole_below_tokens=whole_below_tokens,
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


def _drop_metrics(path: Path, first_step: int) -> None:
    """Keep the records of steps before `first_step`."""
    if not path.exists():
        return
    # A killed run may have left its last line unfinished.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
    records = [(line, json.loads(line)) for line in lines]
    kept = [
        line
        for line, record in records
        if record.get("step", -1) < first_step and record.get("evaluated_after", 0) <= first_step
    ]
    path.write_text("".join(kept), encoding="utf-8")


_HEADER = (
    f"{'step':>4} {'loss':>7} {'tok/s':>7}  {'degree×groups':<18}{'predicted':>9}{'measured':>9}"
    f" {'gap':>5} {'idle':>4} {'plan':>6} {'wait':>6}"
)


def _loss(report: StepReport) -> str:
    return "–" if report.loss is None else f"{report.loss:.4f}"


def _line(report: StepReport) -> str:
    """One step in 80 columns."""
    return (
        f"{report.step:>4} {_loss(report):>7} {report.tokens_per_s:>7,.0f}  "
        f"{format_degrees(report.degrees):<18} {report.predicted_s:>7.2f}s {report.measured_s:>7.2f}s"
        f" {report.gap:>5.3f} {report.idle_share:>4.0%} {report.plan_s * 1e3:>4.0f}ms"
        f" {report.exposed_s * 1e3:>4.0f}ms"
    )


def _summary(
    reports: Sequence[StepReport], eval_losses: dict[int, float], correction: Correction | None
) -> Table:
    table = Table(title="Run", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    steps_s = sum(report.step_s for report in reports)
    degrees: dict[int, int] = {}
    for report in reports:
        for degree, count in report.degrees.items():
            degrees[degree] = degrees.get(degree, 0) + count
    table.add_row("steps", str(len(reports)))
    table.add_row("loss, first → last", f"{_loss(reports[0])} → {_loss(reports[-1])}")
    for done, loss in eval_losses.items():
        table.add_row(f"evaluation loss after {done}", f"{loss:.4f}")
    table.add_row("tokens/s", f"{sum(report.tokens for report in reports) / steps_s:,.0f}")
    table.add_row("degree×groups", format_degrees(dict(sorted(degrees.items()))))
    predicted = sum(report.predicted_s for report in reports)
    measured = sum(report.measured_s for report in reports)
    table.add_row("predicted / measured time of tasks", f"{predicted:.1f} s / {measured:.1f} s")
    if correction is not None:
        for name, factor in zip(TERMS, correction.factors, strict=True):
            table.add_row(f"learnt: {name}", f"× {factor:.2f}")
    table.add_row("gap to the bound, mean", f"{sum(report.gap for report in reports) / len(reports):.3f}")
    table.add_row("planning, mean", f"{1e3 * sum(r.plan_s for r in reports) / len(reports):.0f} ms")
    later = reports[1:]  # the first step has nothing to hide its plan and data behind
    later_s = sum(report.step_s for report in later) or 1.0
    plan_wait = sum(report.plan_wait_s for report in later) / later_s
    data_wait = sum(report.data_wait_s for report in later) / later_s
    table.add_row("waited for the first plan and data", f"{reports[0].exposed_s:.2f} s")
    table.add_row("waited later for plans, for data", f"{plan_wait:.2%}, {data_wait:.2%} of the time")
    return table
