"""`flexcp simulate`: a run of many steps as discrete events, and the run folder that it would leave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flexcp.cli.comparison import ONLY_NAMED
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
from flexcp.cli.simulated import simulated
from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.cost.calibration import hardware_at
from flexcp.cost.memory import SHARDINGS
from flexcp.planner import POLICIES
from flexcp.simulate import Conditions, Failure, collectives
from flexcp.simulate.reduction import IN_WAVES

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
        str,
        typer.Option(
            help=f"all, or some of {', '.join(POLICIES)}, with commas; all meet the same day.",
            rich_help_panel=POLICY,
        ),
    ] = "flexcp",
    jitter: Annotated[
        float,
        typer.Option(help="Spread of a rank's time in a task, such as 0.05.", rich_help_panel=_DAY),
    ] = 0.0,
    jitter_seed: Annotated[
        int | None,
        typer.Option(help="Which jitter is drawn.", show_default="--seed", rich_help_panel=_DAY),
    ] = None,
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
            help="Collectives of all ranks: end, as the engine does; overlap, layer by layer behind the "
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
    policies = _policies(policy, out)
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
    day = Conditions(
        jitter=jitter,
        seed=seed if jitter_seed is None else jitter_seed,
        speeds=speeds,
        failure=failure,
        uplinks=uplinks,
        cores=cores,
        optimizer_s=optimizer_s,
        plan_s=plan_s,
        data_s=data_s,
    )
    element_bytes = hardware_at(hardware_name).element_bytes
    conditions = _with_collectives(day, request, sharding or "zero1", element_bytes, reduce)
    left_out = ONLY_NAMED if policy == "all" else {}
    result = simulated(request, policies, conditions, out, left_out=left_out, shown=not as_json)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        result.show(Console(), out)
    if result.failed:
        raise result.failed


def _policies(given: str, out: Path | None) -> tuple[str, ...]:
    names = tuple(POLICIES) if given == "all" else tuple(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in POLICIES:
            raise UnknownNameError("policy", name, ["all", *POLICIES])
    if out and len(names) > 1:
        raise ConfigError(
            f"--out {out} is one run, and there are {len(names)} policies", "Give one policy, or no --out."
        )
    return names


def _with_collectives(
    day: Conditions, request: Request, sharding: str, element_bytes: int, reduce: str
) -> Conditions:
    """The day with what all ranks exchange, by how weights, gradients and optimizer are sharded."""
    if reduce not in _REDUCTIONS:
        raise UnknownNameError("reduction", reduce, _REDUCTIONS)
    setting = request.setting
    day.require_fitting(setting.cluster, setting.mode)
    kind = next((known for known in SHARDINGS if known == sharding), None)
    if kind is None:
        raise UnknownNameError("sharding", sharding, SHARDINGS)
    if kind in IN_WAVES and setting.mode != "lockstep":
        raise ConfigError(
            f"{kind} exchanges weights or gradients of all ranks while tasks run, and ranks run freely",
            "Give --mode lockstep, or zero1: FSDP2 as flexcp train runs it, gathered once a step.",
        )
    if reduce == "none":
        return day
    found = collectives(
        request.shape,
        setting.cluster,
        setting.cost,
        kind,
        element_bytes=element_bytes,
        uplinks=day.uplinks,
    )
    overlap = reduce == "overlap"
    return replace(day, reduce_s=found.step_s, wave_s=found.wave_s, reduce_overlap=overlap)


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
