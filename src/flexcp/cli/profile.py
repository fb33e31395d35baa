"""`flexcp profile`: measures the ranks at hand and writes a calibration, which serves as a preset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexcp.cli.imported import import_tasks, show_attention
from flexcp.cli.outputs import require_writable, write_output
from flexcp.core.errors import ConfigError, MissingExtraError
from flexcp.cost.calibration import is_calibration
from flexcp.cost.measurements import is_attention_table, require_columns
from flexcp.cost.profiled import Profiled
from flexcp.report.tables import format_seconds

_NO_CALIBRATION = "attention times alone make no calibration, but show how well they are predicted"
_WORST = 3  # tasks to name
_MEANING = {
    "pair_s": "one attended pair",
    "token_s": "one token, outside of attention",
    "sample_s": "one more sample in a pack",
    "pack_s": "a pack, however small",
    "ring_step_s": "one more step of a ring",
}


def profile(
    out: Annotated[
        Path | None, typer.Option(help="File to write, .json.", show_default="required to measure")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Local ranks; 1 measures all but links.", show_default="2"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Run file whose model to measure.", show_default="a small Qwen3")
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=64, help="Tokens of the longest sample.", show_default="4096")
    ] = None,
    seconds: Annotated[int | None, typer.Option(min=5, help="Time to spend.", show_default="90")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Also write the measured tasks, .csv, as --import reads them.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--import", help="CSV of task or attention times to fit instead of measuring."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the imported tasks.")] = None,
    hardware_name: Annotated[
        str | None,
        typer.Option("--hardware", help="Preset that ran the imported tasks.", show_default="h100"),
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Whether the imported tasks recomputed their layers.",
            show_default="yes",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file instead of a table.")] = False,
) -> None:
    """Measure this machine, for plans that follow its real times.

    Runs forward and backward of the model over lengths, samples and degrees, and fits the time formula.
    """
    measuring = {"nproc": nproc, "config": config, "longest": longest, "seconds": seconds, "rows": rows}
    importing = {"model": model, "hardware": hardware_name, "checkpointing": checkpointing}
    if table is None:
        _refuse(importing, "nothing is imported", "Name the model to measure in a run file: --config.")
    else:
        _refuse(measuring, f"{table} is imported, nothing is measured", "Leave it out.")
    if table is not None and is_attention_table(table):
        _refuse({"out": out, "json": as_json or None, **importing}, _NO_CALIBRATION, "Leave it out.")
        show_attention(table, Console())
        return
    if table is not None:
        require_columns(table)
    out = _checked_output(out, rows)
    if table is not None:
        found: Profiled | None = import_tasks(
            table, model, hardware_name or "h100", checkpointing=checkpointing is not False
        )
    else:
        found = _measured(config, nproc or 2, longest or 4096, seconds or 90, shown=not as_json)
    if found is None:  # another rank of torchrun writes
        return
    write_output(out, found.calibration.to_json())
    if rows is not None:
        write_output(rows, found.to_csv())
    if as_json:
        typer.echo(json.dumps(json.loads(found.calibration.to_json())))
    else:
        _show(found, out, Console())


def _refuse(options: Mapping[str, object], cause: str, remedy: str) -> None:
    """Options that would be ignored."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"--{name} says nothing here: {cause}", remedy)


def _checked_output(out: Path | None, rows: Path | None) -> Path:
    if out is None:
        raise ConfigError("--out is missing", "Name the file to write: --out calibration.json.")
    if not is_calibration(out.name):
        raise ConfigError(f"--out {out} is not a .json file", "Calibrations are JSON.")
    if rows is not None and rows.suffix != ".csv":
        raise ConfigError(f"--rows {rows} is not a .csv file", "Measured tasks are a table.")
    for path in (out, rows):
        if path is not None:
            require_writable(path)
    return out


def _measured(config: Path | None, nproc: int, longest: int, seconds: int, *, shown: bool) -> Profiled | None:
    try:
        from flexcp.runtime.launch import launch
        from flexcp.train.config import TrainConfig, load_config
        from flexcp.train.profiling import profile_rank
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flexcp"):
            raise
        raise MissingExtraError(error.name.split(".")[0], "train") from error
    run = load_config(config) if config is not None else TrainConfig()
    found: Profiled | None = launch(profile_rank, nproc, (run, longest, float(seconds), shown))[0]
    return found


def _show(found: Profiled, out: Path, console: Console) -> None:
    calibration, setup = found.calibration, found.calibration.setup
    table = Table(title=f"{setup.device}, {setup.model.name} of {setup.model.layers} layers")
    table.add_column("time of")
    table.add_column("value", justify="right")
    table.add_column("moves by", justify="right")
    for term, meaning in _MEANING.items():
        table.add_row(
            meaning, format_seconds(calibration.coefficients[term]), f"± {calibration.spreads[term]:.0%}"
        )
    if setup.link is not None:
        table.add_row("one message of a ring", format_seconds(setup.link.latency_s), "")
        table.add_row("one more megabyte in it", format_seconds(1e6 / setup.link.bytes_per_s), "")
    if setup.memory_bytes_per_token is not None:
        table.add_row("memory of one token", f"{setup.memory_bytes_per_token / 1e3:,.0f} kB", "")
    console.print(table)
    fewest, most = calibration.tokens
    console.print(
        f"A task that was not fitted is predicted within {calibration.error_mean:.1%} on average, "
        f"{calibration.error_max:.1%} at worst ({calibration.measurements} tasks of {fewest:,} to {most:,} "
        f"tokens, degrees {', '.join(map(str, calibration.degrees))}, {setup.clock} time).",
        highlight=False,
    )
    worst = "; ".join(f"{task}: {error:+.0%}" for task, error in found.worst(_WORST))
    console.print(f"The formula misses most: {worst}.", style="dim", markup=False, highlight=False)
    for outlier in calibration.outliers:
        console.print(f"left out: {outlier}", style="yellow", markup=False, highlight=False)
    console.print(f'wrote {out}; use it with parallel.hardware = "{out}"', markup=False, highlight=False)
