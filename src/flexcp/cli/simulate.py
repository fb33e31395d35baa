"""`flexcp simulate`: a run of many steps as discrete events, and the run folder that it would leave."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flexcp.cli.memory import Holding, MemorySize, ShardingName, TokensPerRank
from flexcp.cli.request import (
    BATCH,
    OUTPUT,
    POLICY,
    Checkpointing,
    Column,
    GlobalBatch,
    HardwareName,
    LengthFiles,
    ModelName,
    ModeName,
    Ranks,
    RanksPerNode,
    Request,
    Seed,
    read_request,
)
from flexcp.core.errors import ConfigError, RankFailedError, UnknownNameError
from flexcp.core.run_folder import RunInfo
from flexcp.cost import CostModel
from flexcp.planner import POLICIES, Planner
from flexcp.report.tables import format_seconds
from flexcp.simulate import Conditions, Failure, RankTime, SimulatedStep, reduction_s
from flexcp.simulate import simulate as run
from flexcp.simulate.folder import SimulatedFolder

SIMULATION_SCHEMA = "flexcp.simulation/1"

_DAY = "Machine and day"
_REDUCTIONS = ("end", "overlap", "none")


def simulate(
    lengths: LengthFiles,
    model: ModelName,
    ranks: Ranks,
    hardware_name: HardwareName = "h100",
    ranks_per_node: RanksPerNode = 8,
    tokens: TokensPerRank = None,
    memory: MemorySize = None,
    sharding: ShardingName = None,
    checkpointing: Checkpointing = None,
    column: Column = None,
    global_batch: GlobalBatch = 512,
    steps: Annotated[int, typer.Option(help="Steps to run.", rich_help_panel=BATCH)] = 10,
    seed: Seed = 0,
    mode: ModeName = "free-running",
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}.", rich_help_panel=POLICY)
    ] = "flexcp",
    jitter: Annotated[
        float,
        typer.Option(help="Spread of a rank's time in a task, such as 0.05.", rich_help_panel=_DAY),
    ] = 0.0,
    slow_rank: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=SPEED", help="Such as 3=0.7; may be repeated.", rich_help_panel=_DAY),
    ] = None,
    fail: Annotated[
        str | None,
        typer.Option(metavar="RANK@SECONDS", help="A rank that dies, and when.", rich_help_panel=_DAY),
    ] = None,
    uplinks: Annotated[
        int | None,
        typer.Option(
            help="Links out of a node, shared by the rings that leave it.",
            show_default="enough",
            rich_help_panel=_DAY,
        ),
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(
            help="Cores that the ranks of a node share, on CPUs.",
            show_default="enough",
            rich_help_panel=_DAY,
        ),
    ] = None,
    reduce: Annotated[
        str,
        typer.Option(
            help="Gradient reduction: end, as the engine does; overlap, layer by layer behind the last "
            "backward; none.",
            rich_help_panel=_DAY,
        ),
    ] = "end",
    optimizer_s: Annotated[
        float, typer.Option("--optimizer", help="Seconds of an optimizer step.", rich_help_panel=_DAY)
    ] = 0.0,
    plan_s: Annotated[
        float,
        typer.Option("--planning", help="Seconds to plan a step, in the background.", rich_help_panel=_DAY),
    ] = 0.0,
    data_s: Annotated[
        float,
        typer.Option("--data", help="Seconds to read a step, in the background.", rich_help_panel=_DAY),
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=OUTPUT)
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="New folder for metrics and traces, as of a real run.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Run plans as discrete events: links, slow ranks, jitter, failures; needs no torch.

    Without options of the machine and day a step takes what its plan predicts, and the gradient reduction.
    """
    if policy not in POLICIES:
        raise UnknownNameError("policy", policy, POLICIES)
    if reduce not in _REDUCTIONS:
        raise UnknownNameError("reduction", reduce, _REDUCTIONS)
    speeds, failure = _speeds(slow_rank or ()), _failure(fail)
    request = read_request(
        lengths,
        model=model,
        ranks=ranks,
        hardware_name=hardware_name,
        ranks_per_node=ranks_per_node,
        holding=Holding(tokens, memory, sharding),
        checkpointing=checkpointing,
        column=column,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
        mode=mode,
        epochs=True,
    )
    setting = request.setting
    conditions = Conditions(
        jitter=jitter,
        seed=seed,
        speeds=speeds,
        failure=failure,
        uplinks=uplinks,
        cores=cores,
        reduce_overlap=reduce == "overlap",
        reduce_s=0.0
        if reduce == "none"
        else reduction_s(request.shape, setting.cluster, setting.cost, uplinks=uplinks),
        optimizer_s=optimizer_s,
        plan_s=plan_s,
        data_s=data_s,
    )
    conditions.require_ranks(setting.cluster)
    result = _Result(request, policy, conditions)
    failed = result.run(out, shown=not as_json)
    if failure and not failed:
        result.notices.append(
            f"Rank {failure.rank} has no time to fail: the run ends before {failure.at_s:g} s."
        )
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        result.show(Console(), out)
    if failed:
        raise failed


def _speeds(given: Sequence[str]) -> dict[int, float]:
    """Rank to speed.

    >>> _speeds(["3=0.5", "4=0.9"])
    {3: 0.5, 4: 0.9}
    """
    speeds: dict[int, float] = {}
    for text in given:
        rank, speed = _pair("--slow-rank", text, "=", "RANK=SPEED, such as 3=0.7")
        if rank in speeds:
            raise ConfigError(f"--slow-rank names rank {rank} twice", "Give each rank one speed.")
        speeds[rank] = speed
    return speeds


def _failure(given: str | None) -> Failure | None:
    return None if given is None else Failure(*_pair("--fail", given, "@", "RANK@SECONDS, such as 5@120"))


def _pair(option: str, text: str, mark: str, form: str) -> tuple[int, float]:
    rank, _, value = text.partition(mark)
    try:
        return int(rank), float(value)
    except ValueError:
        raise ConfigError(f"{option} {text[:40]} cannot be read", f"Give {form}.") from None


class _Result:
    """A simulated run, and the forms in which it is told."""

    def __init__(self, request: Request, policy: str, conditions: Conditions) -> None:
        self._request, self._policy, self._conditions = request, policy, conditions
        self._steps: list[SimulatedStep] = []
        self.notices: list[str] = self._request.inputs["notices"]

    @property
    def _cost(self) -> CostModel:
        return self._request.setting.cost

    def run(self, out: Path | None, *, shown: bool) -> RankFailedError | None:
        """Simulate; returns the failure that ended the run, if one did."""
        setting = self._request.setting
        planner = Planner(setting.cluster, setting.cost, self._policy, setting.mode)
        with ExitStack() as stack:
            folder = stack.enter_context(SimulatedFolder(out, self._info())) if out else None
            batches = stack.enter_context(_progress(shown)).track(self._request.batches, description="steps")
            plans = (planner(batch) for batch in batches)
            try:
                for step in run(plans, self._cost, self._conditions, folder.record if folder else None):
                    self._steps.append(step)
                    if folder:
                        folder.step(step.report)
            except RankFailedError as error:
                return error
        return None

    def _info(self) -> RunInfo:
        given, setting = self._request.inputs, self._request.setting
        return RunInfo(
            origin="simulated",
            model=given["model"],
            hardware=given["hardware"],
            policy=self._policy,
            mode=setting.mode,
            cluster=setting.cluster,
            whole_below_tokens=setting.whole_below_tokens,
            coefficients=asdict(self._cost),
        )

    def as_json(self) -> dict[str, Any]:
        """Steps in the form of metrics.jsonl, each with the shares of its time."""
        return {
            "schema": SIMULATION_SCHEMA,
            "inputs": self._request.inputs | {"policy": self._policy},
            "conditions": asdict(self._conditions),
            "steps": [step.report.to_record() | {"shares": step.time.shares} for step in self._steps],
        }

    def show(self, console: Console, out: Path | None) -> None:
        """Headline, notices, table."""
        console.print(Text(f"{self._policy}: {self._request.headline}", "dim"), highlight=False)
        for notice in self.notices:
            console.print(Text("note: ", "yellow").append(notice, "default"), highlight=False)
        if self._steps:
            console.print(self._table())
        if out:
            console.print(f"wrote {out}; flexcp report {out} draws it", markup=False, highlight=False)

    def _table(self) -> Table:
        reports = [step.report for step in self._steps]
        count, total_s = len(reports), sum(report.step_s for report in reports)
        tokens_per_s = sum(report.tokens for report in reports) / total_s
        table = Table(title="Simulated run", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        slowest = max(reports, key=lambda report: report.step_s)
        table.add_row("steps", str(count))
        table.add_row("step, mean", format_seconds(total_s / count))
        table.add_row("step, longest", f"{format_seconds(slowest.step_s)} (step {slowest.step})")
        table.add_row("tasks of a step, as planned", format_seconds(_mean(r.predicted_s for r in reports)))
        table.add_row("tasks of a step, simulated", format_seconds(_mean(r.measured_s for r in reports)))
        table.add_row("tokens/s", f"{tokens_per_s:,.0f}")
        table.add_row("tokens/s a rank", f"{tokens_per_s / self._request.setting.cluster.ranks:,.0f}")
        table.add_section()
        shares = sum((step.time for step in self._steps), RankTime()).shares
        for part, label in _PARTS.items():
            table.add_row(label, f"{shares[part]:.1%}")
        return table


_PARTS = {
    "compute": "computing",
    "messages": "messages not hidden",
    "sharing": "links or cores shared",
    "pace": "slow ranks and jitter",
    "idle": "idle, no task",
    "reduce": "gradient reduction",
    "optimizer": "optimizer",
    "wait": "waiting for plan and data",
}


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
    )
