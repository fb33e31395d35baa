"""`flexcp profile`: measures the ranks at hand and writes a calibration, which serves as a preset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flexcp.cli.imported import import_tasks, show_attention
from flexcp.cli.outputs import require_writable, write_output
from flexcp.core.errors import ConfigError, MissingExtraError
from flexcp.cost.calibration import Calibration, is_calibration
from flexcp.cost.measurements import is_attention_table, require_columns

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
    nproc: Annotated[int, typer.Option(min=2, help="Local ranks; torchrun knows better.")] = 2,
    config: Annotated[
        Path | None, typer.Option(help="Run file whose model to measure.", show_default="a small Qwen3")
    ] = None,
    longest: Annotated[int, typer.Option(min=64, help="Tokens of the longest sample.")] = 4096,
    seconds: Annotated[int, typer.Option(min=5, help="Time to spend.")] = 90,
    table: Annotated[
        Path | None,
        typer.Option("--import", help="CSV of task or attention times to fit instead of measuring."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the imported tasks.")] = None,
    hardware_name: Annotated[
        str, typer.Option("--hardware", help="Preset that ran the imported tasks.")
    ] = "h100",
    as_json: Annotated[bool, typer.Option("--json", help="Print the file instead of a table.")] = False,
) -> None:
    """Measure this machine, for plans that follow its real times.

    Runs forward and backward of the model over lengths, samples and degrees, and fits the time formula.
    """
    if table is not None and is_attention_table(table):
        if out is not None:
            raise ConfigError(
                f"{table} holds attention times, which alone make no calibration",
                "Leave --out away to see how well they are predicted.",
            )
        show_attention(table, Console())
        return
    if table is not None:
        require_columns(table)
    if out is None:
        raise ConfigError("--out is missing", "Name the file to write: --out calibration.json.")
    if not is_calibration(out.name):
        raise ConfigError(f"--out {out} is not a .json file", "Calibrations are JSON.")
    require_writable(out)
    if table is not None:
        calibration: Calibration | None = import_tasks(table, model, hardware_name)
    else:
        calibration = _measured(config, nproc, longest, seconds, shown=not as_json)
    if calibration is None:  # another rank of torchrun writes
        return
    write_output(out, calibration.to_json())
    if as_json:
        typer.echo(json.dumps(json.loads(calibration.to_json())))
    else:
        _show(calibration, out, Console())


def _measured(
    config: Path | None, nproc: int, longest: int, seconds: int, *, shown: bool
) -> Calibration | None:
    try:
        from flexcp.runtime.launch import launch
        from flexcp.train.config import TrainConfig, load_config
        from flexcp.train.profiling import profile_rank
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flexcp"):
            raise
        raise MissingExtraError(error.name.split(".")[0], "train") from error
    run = load_config(config) if config is not None else TrainConfig()
    found: Calibration | None = launch(profile_rank, nproc, (run, longest, float(seconds), shown))[0]
    return found


def _show(calibration: Calibration, out: Path, console: Console) -> None:
    setup = calibration.setup
    table = Table(title=f"{setup.device}, {setup.model.name} of {setup.model.layers} layers")
    table.add_column("time of")
    table.add_column("value", justify="right")
    table.add_column("moves by", justify="right")
    for term, meaning in _MEANING.items():
        table.add_row(meaning, _seconds(calibration.coefficients[term]), f"± {calibration.spreads[term]:.0%}")
    table.add_row("one message of a ring", _seconds(setup.link.latency_s), "")
    table.add_row("one more megabyte in it", _seconds(1e6 / setup.link.bytes_per_s), "")
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
    for outlier in calibration.outliers:
        console.print(f"left out: {outlier}", style="yellow", markup=False, highlight=False)
    console.print(f'wrote {out}; use it with parallel.hardware = "{out}"', markup=False, highlight=False)


def _seconds(value: float) -> str:
    """With the unit that leaves one to three digits before the point.

    >>> _seconds(0.0117), _seconds(8.2e-05), _seconds(2.7e-07)
    ('11.7 ms', '82 us', '270 ns')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-12:.3g} ps"
