"""What `plan` and `simulate` are asked in the same words: the shared options, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flexcp.cli.comparison import Setting
from flexcp.cli.inputs import Batch, EpochBatches, Inputs, global_batches, read_inputs, refuse_too_long
from flexcp.cli.megatron_args import MegatronRun
from flexcp.cli.memory import Holding
from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.core.model_shape import MODEL_SHAPES, ModelShape, model_shape
from flexcp.core.plan import Mode
from flexcp.cost import HARDWARE, cost_model, hardware
from flexcp.cost.calibration import Calibration, is_calibration, read_calibration
from flexcp.cost.doubts import doubts
from flexcp.planner import MODES

CLUSTER, BATCH, POLICY, OUTPUT = "Model and cluster", "Global batch", "Policies", "Output"

LengthFiles = Annotated[
    list[Path], typer.Argument(help="Length files: JSON, JSON lines, CSV, text, .idx, ServeGen.")
]
ModelName = Annotated[str, typer.Option(help=f"One of {', '.join(MODEL_SHAPES)}.", rich_help_panel=CLUSTER)]
Ranks = Annotated[int, typer.Option(help="Ranks, one per TP×PP cell.", rich_help_panel=CLUSTER)]
HardwareName = Annotated[
    str,
    typer.Option(
        "--hardware",
        help=f"One of {', '.join(HARDWARE)}, or the .json of flexcp profile.",
        rich_help_panel=CLUSTER,
    ),
]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        help="Whether layers are recomputed in the backward pass.",
        show_default="yes, or as calibration or script",
        rich_help_panel=CLUSTER,
    ),
]
RanksPerNode = Annotated[int, typer.Option(help="Ranks that share the fast links.", rich_help_panel=CLUSTER)]
Column = Annotated[
    str | None,
    typer.Option(help="Column or key of the lengths.", show_default="usual", rich_help_panel=BATCH),
]
GlobalBatch = Annotated[int, typer.Option(help="Samples a step.", rich_help_panel=BATCH)]
Seed = Annotated[int, typer.Option(help="Which samples are drawn.", rich_help_panel=BATCH)]
ModeName = Annotated[
    str,
    typer.Option(
        help="free-running, as the engine runs: ranks meet once a step; lockstep: after every wave.",
        rich_help_panel=POLICY,
    ),
]


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan, read and checked.

    Attributes:
        inputs: what was asked, for the record: JSON values.
    """

    shape: ModelShape
    setting: Setting
    given: Inputs
    batches: Sequence[Batch]
    inputs: dict[str, Any]

    @property
    def headline(self) -> str:
        """The setting in one sentence."""
        given = self.inputs
        steps = f"{given['steps']} step{'s' if given['steps'] > 1 else ''}"
        if given["steps"] == 1 and given["samples"] >= 2 * given["global_batch"]:
            steps = "1 step (one draw; --steps 8 averages)"
        return (
            f"{given['model']} on {given['ranks']} × {given['hardware']} ({given['ranks_per_node']} a node), "
            f"up to {given['tokens_per_rank']:,} tokens a rank, {given['mode']}; "
            f"{given['samples']:,} lengths, global batch {given['global_batch']}, {steps}, "
            f"seed {given['seed']}"
        )


def read_request(
    lengths: Sequence[Path],
    *,
    model: str,
    ranks: int,
    hardware_name: str,
    ranks_per_node: int,
    holding: Holding,
    checkpointing: bool | None,
    column: str | None,
    global_batch: int,
    steps: int,
    seed: int,
    mode: str,
    epochs: bool,
    megatron: MegatronRun | None = None,
) -> Request:
    """Read the files and check the options; the arguments are the options of the same names.

    With `epochs` a run goes on where the samples run out, as training does; else there are fewer steps. With
    `megatron` the model is its, and a rank is one of its cells; the other arguments have been chosen.

    Raises:
        InputError: an option or a length cannot be used; it is named.
    """
    shape = megatron.shape if megatron else model_shape(model)
    calibration = read_calibration(Path(hardware_name)) if is_calibration(hardware_name) else None
    device = calibration.hardware if calibration else hardware(hardware_name)
    if megatron:
        device = device.cell(megatron.tensor, megatron.pipeline)
    if checkpointing is None:
        checkpointing = _recomputes(calibration, megatron)
    _refuse_below_one(ranks=ranks, global_batch=global_batch, steps=steps)
    per_rank, derived = holding.tokens_per_rank(shape, device, ranks, checkpointing=checkpointing)
    cost = cost_model(shape, device, checkpointing=checkpointing)
    setting = Setting(Cluster(ranks, per_rank, ranks_per_node), cost, _mode(mode))
    given = read_inputs(lengths, column).encoded(shape, device)
    refuse_too_long(given, setting.cluster)
    batches = (EpochBatches if epochs else global_batches)(given, global_batch, steps, seed)
    inputs = {
        "lengths": [str(path) for path in lengths],
        "samples": len(given.lengths),
        "model": model,
        "hardware": hardware_name,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": per_rank,
        "checkpointing": checkpointing,
        "global_batch": global_batch,
        "steps": len(batches),
        "seed": seed,
        "mode": mode,
        "whole_below_tokens": setting.whole_below_tokens,
        "notices": [
            *(megatron.notices if megatron else ()),
            *derived,
            *_notices(given, setting.cluster),
            *(() if epochs else _run_out(batches, global_batch, steps, len(given.lengths))),
            *_doubts(calibration, shape, given, setting, checkpointing=checkpointing),
        ],
    }
    return Request(shape, setting, given, batches, inputs)


def _recomputes(calibration: Calibration | None, megatron: MegatronRun | None) -> bool:
    """As the script says, or the calibration was measured; presets are planned with recomputation."""
    if megatron is not None:
        return megatron.checkpointing
    return calibration.setup.checkpointing if calibration is not None else True


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


def _notices(given: Inputs, cluster: Cluster) -> list[str]:
    """What the user should know before believing the numbers."""
    last = cluster.ranks % cluster.ranks_per_node
    if not last or cluster.ranks < cluster.ranks_per_node:
        return list(given.notices)
    node = f"{cluster.ranks} ranks in nodes of {cluster.ranks_per_node}: the last node has {last}."
    return [*given.notices, node]


def _run_out(batches: Sequence[Batch], global_batch: int, steps: int, samples: int) -> list[str]:
    """Where the samples are too few for what was asked; a run would begin another epoch."""
    if samples >= global_batch * steps:
        return []
    said = f"{samples:,} lengths are not enough for {steps} steps of {global_batch:,}"
    made = f"planned are {len(batches)}, the last of {len(batches[-1]):,} samples"
    return [f"{said}: {made}. flexcp simulate goes on with the next epoch."]


def _doubts(
    calibration: Calibration | None,
    shape: ModelShape,
    given: Inputs,
    setting: Setting,
    *,
    checkpointing: bool,
) -> tuple[str, ...]:
    """What a calibration did not see of what is planned; presets say nothing."""
    if calibration is None:
        return ()
    cluster = setting.cluster
    return doubts(
        calibration,
        shape,
        int(given.lengths.max()),
        cluster.ranks,
        checkpointing=checkpointing,
        crosses_nodes=cluster.ranks > cluster.ranks_per_node,
    )
