"""`flexcp reproduce`: the published tables, row by row, beside what the cost model predicts. Runs nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable
from rich.text import Text

from flexcp.cli.outputs import require_writable, write_output
from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.reproduce.result import Column, ExperimentSetup, Result, Table, constants_table

EXPERIMENTS = {
    "main": "the main table: five models, five data sets, and the extreme batch",
    "schedule": "what planning costs, against batch and ranks",
    "scaling": "tokens per second from 8 to 64 devices",
    "noise": "plans made with noisy coefficients",
    "extreme": "one sample of 128k and many of 2-8k",
}
_WRITTEN = (".json", ".md")


def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")],
    steps: Annotated[int, typer.Option(min=1, help="Global batches behind each number.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Which samples are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    out: Annotated[list[Path] | None, typer.Option(help="Also write .json or .md.")] = None,
) -> None:
    """Compare the published tables with ours, row by row; needs no accelerator and no torch.

    Unknown constants are fitted on a few published rows, which are named and marked; the rest is predicted.
    """
    for path in out or ():
        _refuse(path)
    result = run(experiment, ExperimentSetup(steps, seed), shown=not as_json)
    for path in out or ():
        text = result.as_markdown() if path.suffix == ".md" else json.dumps(result.as_json(), indent=1)
        write_output(path, text + "\n")
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        show(result, Console())


def run(experiment: str, setup: ExperimentSetup, *, shown: bool = False) -> Result:
    """Run one experiment, with a progress bar on stderr if `shown`.

    Raises:
        UnknownNameError: no such experiment.
    """
    if experiment not in EXPERIMENTS:
        raise UnknownNameError("experiment", experiment, EXPERIMENTS)
    module = import_module(f"flexcp.reproduce.{experiment}")
    call = cast(Callable[[ExperimentSetup], Result], module.run)
    if not shown:
        return call(setup)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(experiment)

        def progress(label: str, done: int, of: int) -> None:
            bar.update(task, description=label, completed=done, total=of)

        return call(ExperimentSetup(setup.steps, setup.seed, setup.published, progress))


def _refuse(path: Path) -> None:
    if path.suffix not in _WRITTEN:
        raise ConfigError(f"--out {path} is neither .json nor .md", "Values are .json, tables are .md.")
    require_writable(path)


def show(result: Result, console: Console) -> None:
    """Tables, constants and notes."""
    for table in (*result.tables, constants_table(result.constants)):
        console.print(Text(table.title.replace("`", ""), "bold"))
        console.print(_rich(table))
        console.print()
    for note in result.notes:
        console.print(Text("note: ", "yellow").append(note.replace("`", ""), "default"), highlight=False)
    given = result.setup
    console.print(
        Text(f"(fit): a constant was fitted to meet it. Steps {given.steps}, seed {given.seed}.", "dim")
    )


def _rich(table: Table) -> RichTable:
    """Numbers and the words of their titles stay whole; where it is narrow, text is what breaks."""
    drawn = RichTable(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, header_style="dim")
    for column in table.columns:
        title = column.title.replace("`", "")
        if any(isinstance(row.get(column.key), int | float) for row in table.rows):
            cells = (table.cell(row, column) for row in range(len(table.rows)))
            width = max(map(len, (*title.split(), *cells)))
            drawn.add_column("\n".join(wrap(title, width)), justify="right", no_wrap=True)
        else:
            drawn.add_column(title, overflow="fold")
    for row in range(len(table.rows)):
        drawn.add_row(*(_cell(table, row, column) for column in table.columns))
    return drawn


def _cell(table: Table, row: int, column: Column) -> Text:
    text = table.cell(row, column).replace("`", "")
    return Text(text, "dim" if (row, column.key) in table.fitted else "")
