"""Times that others measured: task times become a calibration, attention times are judged by unseen packs."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import model_shape
from flexcp.cost import Link, hardware
from flexcp.cost.attention_fit import AttentionFit, fit_attention
from flexcp.cost.calibration import Setup
from flexcp.cost.measurements import read_attention_times, read_measurements
from flexcp.cost.profiled import Profiled


def import_tasks(path: Path, model: str | None, hardware_name: str, *, checkpointing: bool) -> Profiled:
    """Fit a table of task times.

    Args:
        path: see `cost.measurements.read_measurements`.
        model: which model the tasks were of.
        hardware_name: the preset that ran them; links and memory are its own.
        checkpointing: whether layers were recomputed in the backward pass.

    Raises:
        InputError: an option or a row cannot be used; it is named.
    """
    if model is None:
        raise ConfigError(f"--model is missing: whose tasks are in {path}?", "For example --model qwen3-8b.")
    shape, preset = model_shape(model), hardware(hardware_name)
    setup = Setup(
        device=preset.name,
        clock="wall",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions={"flexcp": version("flexcp")},
        model=shape,
        checkpointing=checkpointing,
        element_bytes=preset.element_bytes,
        link=Link(preset.intra_bytes_per_s, preset.intra_latency_s),
        memory_bytes=preset.memory_bytes,
        inter_link=Link(preset.inter_bytes_per_s, preset.inter_latency_s),
    )
    return Profiled.of(read_measurements(path, encoder=shape.encoder is not None), setup)


def show_attention(path: Path, console: Console) -> None:
    """Fit half of the packs of a table of attention times, and print how well the others are predicted.

    Raises:
        InputError: a row cannot be used, or there are too few.
    """
    found: AttentionFit = fit_attention(read_attention_times(path))
    table = Table(title=f"{path.name}, one layer")
    table.add_column("time of")
    table.add_column("us", justify="right")
    table.add_row("a million attended pairs", f"{found.pair_s * 1e12:.3g}")
    table.add_row("a thousand tokens, beside pairs", f"{found.token_s * 1e9:.3g}")
    table.add_row("a document", f"{found.document_s * 1e6:.3g}")
    for cp, seconds in found.fixed_s.items():
        table.add_row(f"a call at cp {cp}", f"{seconds * 1e6:.3g}")
    console.print(table)
    console.print(
        f"Fitted on {found.fitted_packs} packs; the other {found.unseen_packs} are predicted within "
        f"{found.error_mean:.1%} on average, {found.error_max:.1%} at worst ({found.unseen_rows} times, "
        f"seed {found.seed}).",
        highlight=False,
    )
