"""`flexcp plan`: what each policy would make of a list of lengths. Predicts only; runs nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from flexcp.cli.comparison import compare, verdict
from flexcp.cli.megatron_args import (
    GLOBAL_BATCH,
    RANKS_PER_NODE,
    asked_of,
    changes_of,
    fill_notice,
    read_megatron_args,
)
from flexcp.cli.memory import Holding, MemorySize, ShardingName, TokensPerRank
from flexcp.cli.outputs import require_writable, write_output
from flexcp.cli.plan_json import report_json
from flexcp.cli.request import (
    BATCH,
    CLUSTER,
    OUTPUT,
    POLICY,
    Checkpointing,
    Column,
    HardwareName,
    LengthFiles,
    ModeName,
    Request,
    Seed,
    read_request,
)
from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.core.model_shape import MODEL_SHAPES
from flexcp.cost.calibration import hardware_at
from flexcp.planner import POLICIES
from flexcp.planner.outcome import Outcome
from flexcp.report.explain import explain as explain_plan
from flexcp.report.svg import plan_svg
from flexcp.report.tables import choice_table, format_degrees, policy_table
from flexcp.report.timeline import plan_timeline
from flexcp.simulate.reduction import IN_WAVES


def plan(
    lengths: LengthFiles,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(MODEL_SHAPES)}.", show_default="needed", rich_help_panel=CLUSTER
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks, one per TP×PP cell.", show_default="needed", rich_help_panel=CLUSTER),
    ] = None,
    hardware_name: HardwareName = "h100",
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Ranks that share the fast links.", show_default=str(RANKS_PER_NODE), rich_help_panel=CLUSTER
        ),
    ] = None,
    from_megatron_args: Annotated[
        str | None,
        typer.Option(
            help="Flags of a Megatron-LM launch script, or @ and its path: model, ranks, layout in use.",
            show_default=False,
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    tokens: TokensPerRank = None,
    memory: MemorySize = None,
    sharding: ShardingName = None,
    checkpointing: Checkpointing = None,
    column: Column = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples a step.", show_default=str(GLOBAL_BATCH), rich_help_panel=BATCH),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to plan.", rich_help_panel=BATCH)] = 1,
    seed: Seed = 0,
    mode: ModeName = "free-running",
    policy: Annotated[
        str, typer.Option(help=f"all, or one of {', '.join(POLICIES)}.", rich_help_panel=POLICY)
    ] = "all",
    current_cp: Annotated[
        int | None,
        typer.Option(
            help="Degree in use today, to compare with.",
            show_default="best static",
            rich_help_panel=POLICY,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why long samples got their degrees.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=OUTPUT)
    ] = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write all plans (.json), or draw the first (.svg).", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Plan global batches and compare policies; needs no accelerator and no torch."""
    if policy != "all" and policy not in POLICIES:
        raise UnknownNameError("policy", policy, ["all", *POLICIES])
    _check_outputs(out or ())
    run = None if from_megatron_args is None else read_megatron_args(from_megatron_args)
    asked = asked_of(run, model, ranks, ranks_per_node, global_batch, mode, current_cp)
    request = read_request(
        lengths,
        model=asked.model,
        ranks=asked.ranks,
        hardware_name=hardware_name,
        ranks_per_node=asked.ranks_per_node,
        holding=Holding(tokens, memory, sharding),
        checkpointing=checkpointing,
        column=column,
        global_batch=asked.global_batch,
        steps=steps,
        seed=seed,
        mode=asked.mode,
        epochs=False,
        megatron=run,
    )
    current_cp = asked.current_cp
    notices = [*request.inputs["notices"], *_unpriced(sharding)]
    request = replace(request, inputs=request.inputs | {"notices": notices})
    outcomes, baseline = compare(request.batches, request.setting, policy=policy, current_cp=current_cp)
    sentence = verdict(outcomes, baseline, request.given.lengths, request.setting)
    changes = changes_of(run, request.setting) if run is not None else ()
    if run is not None and run.pipeline > 1 and outcomes[-1].plans:
        request.inputs["notices"].append(fill_notice(run, outcomes[-1].plans[0]))
    report = _Report(request, current_cp, outcomes, baseline, sentence, changes)
    for path in out or ():
        report.write(path)
    if as_json:
        typer.echo(json.dumps(report.as_json(with_tasks=False)))
    else:
        report.show(Console(), explain=explain)


def _unpriced(sharding: str | None) -> list[str]:
    """A sharding that is counted in memory alone."""
    if sharding not in IN_WAVES:
        return []
    notice = (
        f"{sharding} decides the tokens of a rank here and is not in the times: its ranks exchange weights "
        f"or gradients in every wave. flexcp simulate --mode lockstep --sharding {sharding} prices that; "
        "flexcp train has ddp and fsdp2 (zero1), which exchange once a step."
    )
    return [notice]


def _check_outputs(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix not in (".json", ".svg"):
            raise ConfigError(
                f"--out {path} is neither .json nor .svg", "Plans are .json, drawings are .svg."
            )
        require_writable(path)


@dataclass(frozen=True, slots=True)
class _Report:
    """The answer, in each form that it is given."""

    request: Request
    current_cp: int | None
    outcomes: Sequence[Outcome]
    baseline: Outcome
    sentence: str
    changes: Sequence[str] = ()

    @property
    def _subject(self) -> Outcome:
        return self.outcomes[-1]

    def as_json(self, *, with_tasks: bool) -> dict[str, Any]:
        inputs = self.request.inputs | {"current_cp": self.current_cp}
        if self.changes:
            inputs["megatron_changes"] = list(self.changes)
        cost = self.request.setting.cost
        return report_json(inputs, cost, self.outcomes, self.baseline, self.sentence, with_tasks=with_tasks)

    def write(self, path: Path) -> None:
        if path.suffix == ".json":
            text = json.dumps(self.as_json(with_tasks=True)) + "\n"
        elif self._subject.plans:
            text = plan_svg(self._subject.plans[0])
        else:
            raise ConfigError(f"{self._subject.policy} has no plan to draw", self._subject.refusal)
        write_output(path, text)

    def show(self, console: Console, *, explain: bool) -> None:
        console.print(Text(self.sentence, "bold"), highlight=False)
        console.print(Text(self.request.headline, "dim"), highlight=False)
        for notice in self.request.inputs["notices"]:
            console.print(Text("note: ", "yellow").append(notice, "default"), highlight=False)
        for change in self.changes:
            console.print(Text("do: ", "green").append(change, "default"), highlight=False)
        console.print()
        baseline = self.baseline if self.baseline.plans else None
        console.print(policy_table(self.outcomes, baseline, console.width), highlight=False)
        if not self._subject.plans:
            return
        groups = format_degrees(self._subject.degrees, most=14)
        console.print(Text(f"{self._subject.policy}, degree×groups: {groups}", "dim"), highlight=False)
        self._show_hardware(console, explain=explain)
        first = self._subject.plans[0]
        console.print()
        if explain:
            choices = explain_plan(first, self.request.setting.cost)
            console.print(choice_table(choices), highlight=False)
            console.print()
        width = min(console.width, 110)
        console.print(plan_timeline(first, width=width, colour=console.is_terminal))

    def _show_hardware(self, console: Console, *, explain: bool) -> None:
        """Where the numbers of the machine are from: how many of which kind, or each."""
        device = hardware_at(self.request.inputs["hardware"])
        hint = "" if explain else "; --explain names them"
        console.print(Text(f"numbers of {device.name}: {device.origin}{hint}", "dim"), highlight=False)
        for line in device.described() if explain else ():
            console.print(Padding(Text(line, "dim"), (0, 0, 0, 2)), highlight=False)
