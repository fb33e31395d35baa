"""`flexcp train`: runs a TOML file on local ranks, or as one rank that torchrun started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexcp.core.errors import MissingExtraError


def train(
    config: Annotated[Path, typer.Argument(help="run file, TOML; see examples/demo.toml")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override, such as run.steps=10")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="local ranks, instead of parallel.nproc")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="draw nothing")] = False,
) -> None:
    """Train a model as a TOML file says.

    Started plainly it spawns the ranks of one machine; started by torchrun it is one of many.
    """
    try:
        from flexcp.runtime.launch import launch
        from flexcp.train.config import load_config
        from flexcp.train.trainer import train as run_rank
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    overrides = [*(set_ or ()), *([f"parallel.nproc={nproc}"] if nproc else [])]
    settings = load_config(config, overrides)
    launch(run_rank, settings.parallel.nproc, (settings, resume, quiet), timeout_s=settings.run.timeout_s)
