"""`flexcp plan`: what each policy would make of a list of lengths. Predicts only; runs nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from flexcp.cli.comparison import Setting, compare, verdict
from flexcp.cli.inputs import Inputs, global_batches, read_inputs, refuse_too_long
from flexcp.cli.plan_json import report_json
from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.core.model_shape import MODEL_SHAPES, ModelShape, model_shape
from flexcp.core.plan import Mode
from flexcp.cost import HARDWARE, cost_model, tokens_per_rank
from flexcp.cost.calibration import hardware_at, is_calibration, read_calibration
from flexcp.planner import MODES, POLICIES
from flexcp.planner.make import priced
from flexcp.report.explain import explain as explain_plan
from flexcp.report.tables import Outcome, choice_table, format_degrees, policy_table
from flexcp.report.timeline import plan_svg, plan_timeline

_CLUSTER, _BATCH, _POLICY, _OUTPUT = "Model and cluster", "Global batch", "Policies", "Output"


def plan(
    lengths: Annotated[
        list[Path], typer.Argument(help="Length files: JSON, JSON lines, CSV, text, .idx, ServeGen.")
    ],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODEL_SHAPES)}.", rich_help_panel=_CLUSTER)],
    ranks: Annotated[int, typer.Option(help="Ranks, one per TP×PP cell.", rich_help_panel=_CLUSTER)],
    hardware_name: Annotated[
        str,
        typer.Option(
            "--hardware",
            help=f"One of {', '.join(HARDWARE)}, or the .json of flexcp profile.",
            rich_help_panel=_CLUSTER,
        ),
    ] = "h100",
    ranks_per_node: Annotated[
        int, typer.Option(help="Ranks that share the fast links.", rich_help_panel=_CLUSTER)
    ] = 8,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-rank",
            help="Tokens one rank may hold at a time.",
            show_default="from memory",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Column or key of the lengths.", show_default="usual", rich_help_panel=_BATCH),
    ] = None,
    global_batch: Annotated[int, typer.Option(help="Samples a step.", rich_help_panel=_BATCH)] = 512,
    steps: Annotated[int, typer.Option(help="Steps to plan.", rich_help_panel=_BATCH)] = 1,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.", rich_help_panel=_BATCH)] = 0,
    mode: Annotated[
        str,
        typer.Option(
            help="free-running, as the engine runs: ranks meet once a step; lockstep: after every wave.",
            rich_help_panel=_POLICY,
        ),
    ] = "free-running",
    policy: Annotated[
        str, typer.Option(help=f"all, or one of {', '.join(POLICIES)}.", rich_help_panel=_POLICY)
    ] = "all",
    current_cp: Annotated[
        int | None,
        typer.Option(
            help="Degree in use today, to compare with.",
            show_default="best static",
            rich_help_panel=_POLICY,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why long samples got their degrees.", rich_help_panel=_OUTPUT),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)
    ] = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write all plans (.json), or draw the first (.svg).", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Plan global batches and compare policies; needs no accelerator and no torch."""
    shape, device = model_shape(model), hardware_at(hardware_name)
    _refuse_below_one(ranks=ranks, global_batch=global_batch, steps=steps)
    if policy != "all" and policy not in POLICIES:
        raise UnknownNameError("policy", policy, ["all", *POLICIES])
    _refuse_other_files(out or ())
    per_rank = tokens if tokens is not None else tokens_per_rank(shape, device, ranks)
    setting = Setting(Cluster(ranks, per_rank, ranks_per_node), cost_model(shape, device), _mode(mode))
    given = read_inputs(lengths, column)
    refuse_too_long(given, setting.cluster)
    batches = global_batches(given, global_batch, steps, seed)
    outcomes, baseline = compare(batches, setting, policy=policy, current_cp=current_cp)
    inputs = {
        "lengths": [str(path) for path in lengths],
        "samples": len(given.lengths),
        "model": model,
        "hardware": hardware_name,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": per_rank,
        "global_batch": global_batch,
        "steps": len(batches),
        "seed": seed,
        "current_cp": current_cp,
        "mode": mode,
        "whole_below_tokens": setting.whole_below_tokens,
        "notices": [*_notices(given, setting.cluster), *_extrapolated(hardware_name, shape, given, ranks)],
    }
    report = _Report(
        inputs, setting, outcomes, baseline, verdict(outcomes[-1], baseline, given.lengths, setting)
    )
    for path in out or ():
        report.write(path)
    if as_json:
        typer.echo(json.dumps(report.as_json(with_tasks=False)))
    else:
        report.show(Console(), explain=explain)


def _mode(name: str) -> Mode:
    for mode in MODES:
        if mode == name:
            return mode
    raise UnknownNameError("mode", name, MODES)


def _refuse_below_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {count}", f"{option} is at least 1.")


def _refuse_other_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix not in (".json", ".svg"):
            raise ConfigError(
                f"--out {path} is neither .json nor .svg", "Plans are .json, drawings are .svg."
            )


def _notices(given: Inputs, cluster: Cluster) -> list[str]:
    """What the user should know before believing the numbers."""
    last = cluster.ranks % cluster.ranks_per_node
    if not last or cluster.ranks < cluster.ranks_per_node:
        return list(given.notices)
    node = f"{cluster.ranks} ranks in nodes of {cluster.ranks_per_node}: the last node has {last}."
    return [*given.notices, node]


def _extrapolated(name: str, shape: ModelShape, given: Inputs, ranks: int) -> tuple[str, ...]:
    """What a calibration did not see of what is planned; presets say nothing."""
    if not is_calibration(name):
        return ()
    return read_calibration(Path(name)).notices(shape, int(given.lengths.max()), ranks)


@dataclass(frozen=True, slots=True)
class _Report:
    """The answer, in each form that it is given."""

    inputs: dict[str, Any]
    setting: Setting
    outcomes: Sequence[Outcome]
    baseline: Outcome
    sentence: str

    @property
    def _subject(self) -> Outcome:
        return self.outcomes[-1]

    def as_json(self, *, with_tasks: bool) -> dict[str, Any]:
        return report_json(
            self.inputs, self.setting.cost, self.outcomes, self.baseline, self.sentence, with_tasks=with_tasks
        )

    def write(self, path: Path) -> None:
        if path.suffix == ".json":
            text = json.dumps(self.as_json(with_tasks=True)) + "\n"
        elif self._subject.plans:
            text = plan_svg(self._subject.plans[0])
        else:
            raise ConfigError(f"{self._subject.policy} has no plan to draw", self._subject.refusal)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror})", "Name a file in a folder that exists."
            ) from None

    def show(self, console: Console, *, explain: bool) -> None:
        console.print(Text(self.sentence, "bold"), highlight=False)
        console.print(Text(self._headline(), "dim"), highlight=False)
        for notice in self.inputs["notices"]:
            console.print(Text("note: ", "yellow").append(notice, "default"), highlight=False)
        console.print()
        baseline = self.baseline if self.baseline.plans else None
        console.print(policy_table(self.outcomes, baseline, console.width), highlight=False)
        if not self._subject.plans:
            return
        groups = format_degrees(self._subject.degrees, most=14)
        console.print(Text(f"{self._subject.policy}, degree×groups: {groups}", "dim"), highlight=False)
        first = self._subject.plans[0]
        console.print()
        if explain:
            choices = explain_plan(first, priced(self.setting.cost, self._subject.policy))
            console.print(choice_table(choices), highlight=False)
            console.print()
        width = min(console.width, 110)
        console.print(plan_timeline(first, width=width, colour=console.is_terminal))

    def _headline(self) -> str:
        given = self.inputs
        steps = f"{given['steps']} step{'s' if given['steps'] > 1 else ''}"
        return (
            f"{given['model']} on {given['ranks']} × {given['hardware']} ({given['ranks_per_node']} a node), "
            f"up to {given['tokens_per_rank']:,} tokens a rank, {given['mode']}; "
            f"{given['samples']:,} lengths, global batch {given['global_batch']}, {steps}, "
            f"seed {given['seed']}"
        )
