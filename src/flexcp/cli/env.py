"""`flexcp env`: versions, processors, memory, accelerator. Reads only; changes and measures nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ENV_SCHEMA = "flexcp.env/1"
_BASE = ("flexcp", "numpy", "pydantic", "rich", "typer")
_TRAIN = ("torch", "transformers", "tokenizers", "pyarrow", "tensorboard")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, processors and memory: what to paste into a bug report."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    console = Console()
    table = Table.grid(padding=(0, 2))
    table.add_row("python", facts["python"])
    for name, found in facts["packages"].items():
        missing = "[yellow]not installed:[/] pip install 'flexcp\\[train]'"
        table.add_row(name, found or missing)
    table.add_row("system", facts["system"])
    table.add_row("cores", str(facts["cores"]))
    memory = facts["memory_bytes"]
    table.add_row("memory", f"{memory / 2**30:.1f} GiB" if memory else "unknown")
    table.add_row("accelerator", facts["accelerator"] or "none")
    console.print(table, highlight=False)


def collect(find: Callable[[str], str] = version) -> dict[str, Any]:
    """All facts as JSON values; what is absent is null."""
    return {
        "schema": ENV_SCHEMA,
        "python": platform.python_version(),
        "packages": {name: _version(name, find) for name in (*_BASE, *_TRAIN)},
        "system": platform.platform(terse=True),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "accelerator": _accelerator(),
    }


def _version(name: str, find: Callable[[str], str]) -> str | None:
    try:
        return find(name)
    except PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None  # not a POSIX system


def _accelerator() -> str | None:
    """What torch would use; this is the one verb outside training that may import it."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if kind is not None and kind.type == "cuda" else str(kind)
    return f"{count} × {name}"
