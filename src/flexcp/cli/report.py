"""`flexcp report`: a run or a plan as one HTML page, its timeline as SVG or Perfetto trace. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flexcp.cli.outputs import require_writable, write_output
from flexcp.core.errors import ConfigError
from flexcp.core.jsonl import readable
from flexcp.core.plan import Plan
from flexcp.core.trace import Span, task_detail, to_perfetto
from flexcp.report.page.from_plan import subject_of_plan
from flexcp.report.page.from_run import subject_of_run
from flexcp.report.page.html import page
from flexcp.report.page.spans import latest_spans
from flexcp.report.page.subject import Subject, plans_of
from flexcp.report.page.versus import compared
from flexcp.report.svg import plans_svg
from flexcp.report.timeline import plan_timeline

_FORMS = {".html": "pages", ".svg": "drawings", ".json": "spans"}


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_PLAN [RUN]", help="Run folder, or plan .json; two runs are shown side by side."
        ),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="A page (.html), one step for papers (.svg), or spans for ui.perfetto.dev (.json).",
            show_default="report.html beside it",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the .svg and of the terminal.", show_default="an early one")
    ] = None,
) -> None:
    """Show a run or a plan as one page that opens without network.

    Reads the folder of flexcp train, or what flexcp plan --out plan.json wrote.
    """
    source, run = sources[0], _is_run(sources[0])
    _refuse_others(sources)
    targets = out or [(source if run else source.parent) / "report.html"]
    for path in targets:
        if path.suffix not in _FORMS:
            forms = ", ".join(f"{what} are {suffix}" for suffix, what in _FORMS.items())
            raise ConfigError(f"--out {path} is none of {', '.join(_FORMS)}", f"{forms.capitalize()}.")
        require_writable(path)
    console = Console()
    subject = subject_of_run(source, step) if run else subject_of_plan(source, step)
    for other in sources[1:]:
        subject = compared(subject, subject_of_run(other))
    plans = plans_of(subject, step)
    for path in targets:
        _write(path, source, subject, plans, step or 0)
    console.print(Text(subject.verdict, "bold"), highlight=False)
    if subject.beside:
        console.print(Text(subject.beside.verdict, "bold"), highlight=False)
    for advice in subject.advice:
        console.print(Text("do: ", "green").append(advice, "default"), highlight=False)
    for notice in subject.notices:
        console.print(Text("note: ", "yellow").append(notice, "default"), highlight=False)
    for plan in plans:
        console.print(Text(f"\n{plan.policy}", "bold"), highlight=False)
        console.print(plan_timeline(plan, width=min(console.width, 110), colour=console.is_terminal))
    for path in targets:
        console.print(Text(f"wrote {path}"), soft_wrap=True, highlight=False)


def _is_run(source: Path) -> bool:
    with readable(source):
        run, there = source.is_dir(), source.exists()
    if not there:
        raise ConfigError(f"{source} does not exist", "Give a run folder, or the .json of flexcp plan --out.")
    return run


def _refuse_others(sources: Sequence[Path]) -> None:
    """One run or plan, or two runs."""
    if len(sources) > 2:
        raise ConfigError(f"{len(sources)} runs are too many to lie side by side", "Give two.")
    plans = [source for source in sources if not _is_run(source)]
    if len(sources) == 2 and plans:
        raise ConfigError(
            f"{plans[0]} is a plan, and two runs are compared",
            "Give two run folders; flexcp plan compares policies, flexcp simulate runs a plan.",
        )


def _write(path: Path, source: Path, subject: Subject, plans: Sequence[Plan], step: int) -> None:
    if path.suffix == ".html":
        text = page(subject)
    elif path.suffix == ".svg":
        if not plans:
            raise ConfigError(
                f"{source} has too many ranks for one drawing, or incomplete traces", "Make the .html page."
            )
        text = plans_svg(plans)
    else:
        text = to_perfetto(latest_spans(source) if source.is_dir() else _planned_spans(plans, step))
    write_output(path, text)


def _planned_spans(plans: Sequence[Plan], step: int) -> Iterator[Span]:
    """A plan as the trace of a run that goes as predicted."""
    plan = plans[0]
    for task in plan.tasks:
        for rank in task.ranks:
            yield Span(rank, "task", task.start_s, task.end_s, step, task_detail(plan, task, rank))
