"""The command line: one verb a file, loaded when called for; turns library errors into exit codes.

Nothing is decided here. Exit codes: 0 done, 1 the run failed, 2 the input cannot be used, 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flexcp.core.errors import FlexCPError, InputError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

VERBS = {
    "env": "Show versions, processors and memory: what to paste into a bug report.",
    "lengths": "Turn training data into a file of sample lengths.",
    "plan": "Plan global batches and compare policies; needs no accelerator and no torch.",
    "simulate": "Run plans as discrete events: links, slow ranks, jitter, failures; needs no torch.",
    "profile": "Measure this machine, for plans that follow its real times.",
    "train": "Train a model as a TOML file says.",
    "report": "Show a run or a plan as one page that opens without network.",
    "reproduce": "Compare the published tables with ours, row by row.",
}


class _Verbs(TyperGroup):
    """Imports a verb only when it is called, so that `flexcp plan` never pays for `flexcp train`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=text) for name, text in VERBS.items()}

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which a newcomer meets them."""
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the real command in the place of its line of help."""
        if args and args[0] in VERBS:
            self.commands[args[0]] = _load(args[0])
        return super().resolve_command(ctx, args)


def _load(verb: str) -> Any:
    """The command of one verb: the function of that name in the module of that name."""
    try:
        function = getattr(import_module(f"flexcp.cli.{verb}"), verb)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("flexcp"):
            raise
        raise MissingExtraError(error.name.split(".")[0], "train") from error
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name=verb, help=function.__doc__ or VERBS[verb])(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexcp {version('flexcp')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it and stop.")
    ] = False,
) -> None:
    """Flexible context parallelism: any-integer degrees, chosen anew for every global batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; never raises for what a user can mend."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="flexcp")
    except FlexCPError as error:
        _show(error, _stderr())
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return _exit_code(stop)
    return 0


def _exit_code(stop: SystemExit) -> int:
    if isinstance(stop.code, str):
        _stderr().print(stop.code, highlight=False)
        return 1
    return stop.code or 0


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True)


def _show(error: FlexCPError, console: Console) -> None:
    from rich.text import Text

    console.print(Text("error: ", "bold red").append(error.cause, "default"), highlight=False)
    if error.remedy:
        console.print(Text("   fix: ", "bold green").append(error.remedy, "default"), highlight=False)
