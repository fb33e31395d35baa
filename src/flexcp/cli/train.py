"""`flexcp train`: runs a TOML file on local ranks, or as one rank that torchrun started."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from flexcp.core.errors import MissingExtraError

if TYPE_CHECKING:
    from flexcp.train.config import TrainConfig

_EXTRAS = {"tensorboard": "train", "wandb": "wandb"}


def train(
    config: Annotated[Path, typer.Argument(help="run file, TOML; see examples/demo.toml")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override, such as run.steps=10")
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="local ranks, instead of parallel.nproc")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint")] = False,
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="go on with one rank fewer when one is lost; continue what has begun"),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="draw nothing")] = False,
) -> None:
    """Train a model as a TOML file says.

    Started plainly it spawns the ranks of one machine; started by torchrun it is one of many.
    """
    with ExitStack() as early:
        early.enter_context(_ending_at_sigterm())
        overrides = [*(set_ or ()), *([f"parallel.nproc={nproc}"] if nproc else [])]
        _run(config, overrides, early, resume=resume, elastic=elastic, quiet=quiet)


def _run(
    config: Path, overrides: list[str], early: ExitStack, *, resume: bool, elastic: bool, quiet: bool
) -> None:
    _require("torch", "train")
    _require("transformers", "train")
    # The file first: torch takes seconds to import, and a typing error should not wait for it.
    from flexcp.train.config import load_config

    settings = load_config(config, overrides)
    for tracker in settings.run.trackers:
        _require(tracker, _EXTRAS[tracker])
    from flexcp.runtime.launch import under_torchrun

    alone = not under_torchrun()
    if not alone:
        early.close()  # this is a rank, which heeds SIGTERM by itself
    elif not quiet and sys.stderr.isatty():
        ranks = settings.parallel.nproc
        typer.echo(f"starting ranks: {ranks}; each imports torch, which takes seconds", err=True)
    from flexcp.train.trainer import checkpoint_to_resume

    if not elastic:
        checkpoint_to_resume(settings.run.folder, resume)
    try:
        _start(settings, resume=resume, quiet=quiet, elastic=elastic)
    except BaseException as error:
        if alone:
            _leave_the_bar()
            if isinstance(error, KeyboardInterrupt):
                typer.echo(_what_is_left(settings.run.folder), err=True)
        raise


def _start(settings: TrainConfig, *, resume: bool, quiet: bool, elastic: bool) -> None:
    """All ranks, until they have ended."""
    from flexcp.runtime.elastic import launch_elastic
    from flexcp.runtime.launch import launch
    from flexcp.train.trainer import train as run_rank

    run = settings.run
    start = partial(launch_elastic, notify=lambda text: typer.echo(text, err=True)) if elastic else launch
    start(
        run_rank,
        settings.parallel.nproc,
        (settings, resume, quiet, elastic),
        timeout_s=run.timeout_s,
        status_dir=run.folder / "status",
    )


@contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """While nobody is there to be told: before the ranks are, which takes seconds, and between two starts."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit("SIGTERM came while there was no rank to heed it; nothing was begun")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_the_bar() -> None:
    """The rank that drew was ended at once: its bar stands there, and the cursor is hidden."""
    from rich.console import Console

    screen = Console()
    if screen.is_terminal:
        screen.show_cursor()
        screen.print()


def _what_is_left(folder: Path) -> str:
    from flexcp.runtime.checkpoint import checkpoints

    found = checkpoints(folder / "checkpoints")
    if not found:
        return "interrupted; there is no checkpoint to continue from"
    return f"interrupted; --resume continues from {found[-1]}"


def _require(module: str, extra: str) -> None:
    """Without importing it: torch alone takes seconds.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise MissingExtraError(module, extra)
