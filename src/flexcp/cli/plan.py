"""`flexcp plan`: what each policy would make of a list of lengths. Predicts only; runs nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from flexcp.cli.comparison import MODE, compare, global_batches, report_json, verdict
from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, SampleTooLongError, UnknownNameError
from flexcp.core.layout import DEFAULT_WHOLE_BELOW_TOKENS
from flexcp.core.lengths import read_samples
from flexcp.core.model_shape import MODEL_SHAPES, model_shape
from flexcp.core.sample import Sample
from flexcp.cost import HARDWARE, cost_model, hardware, tokens_per_rank
from flexcp.planner import POLICIES
from flexcp.report.tables import Outcome, policy_table
from flexcp.report.timeline import plan_svg, plan_timeline

_CLUSTER, _BATCH, _OUTPUT = "Model and cluster", "Global batch and policies", "Output"


def plan(
    lengths: Annotated[list[Path], typer.Argument(help="Length files: JSON, JSON lines, CSV, text, .idx.")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODEL_SHAPES)}.", rich_help_panel=_CLUSTER)],
    ranks: Annotated[int, typer.Option(help="Ranks, one per TP×PP cell.", rich_help_panel=_CLUSTER)],
    hardware_name: Annotated[
        str, typer.Option("--hardware", help=f"One of {', '.join(HARDWARE)}.", rich_help_panel=_CLUSTER)
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
    global_batch: Annotated[int, typer.Option(help="Samples a step.", rich_help_panel=_BATCH)] = 512,
    steps: Annotated[int, typer.Option(help="Steps to plan.", rich_help_panel=_BATCH)] = 1,
    seed: Annotated[int, typer.Option(help="Which samples are drawn.", rich_help_panel=_BATCH)] = 0,
    policy: Annotated[
        str, typer.Option(help=f"all, or one of {', '.join(POLICIES)}.", rich_help_panel=_BATCH)
    ] = "all",
    current_cp: Annotated[
        int | None,
        typer.Option(
            help="Degree in use today, to compare with.",
            show_default="best static",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_OUTPUT)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write that object with all tasks.", rich_help_panel=_OUTPUT)
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the first step of the plan.", rich_help_panel=_OUTPUT)
    ] = None,
) -> None:
    """Plan global batches and compare policies; needs no accelerator and no torch."""
    shape, device = model_shape(model), hardware(hardware_name)
    _refuse_below_one(ranks=ranks, global_batch=global_batch, steps=steps)
    if policy != "all" and policy not in POLICIES:
        raise UnknownNameError("policy", policy, ["all", *POLICIES])
    per_rank = tokens if tokens is not None else tokens_per_rank(shape, device, ranks)
    cluster = Cluster(ranks, per_rank, ranks_per_node)
    samples = _read_all(lengths)
    _refuse_too_long(samples, cluster)
    batches = global_batches(samples, global_batch, steps, seed)
    cost = cost_model(shape, device)
    outcomes, baseline = compare(batches, cluster, cost, policy=policy, current_cp=current_cp)
    subject = outcomes[-1]
    sentence = verdict(subject, baseline, samples)
    inputs = {
        "lengths": [str(path) for path in lengths],
        "samples": len(samples),
        "model": model,
        "hardware": hardware_name,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "tokens_per_rank": per_rank,
        "global_batch": global_batch,
        "steps": len(batches),
        "seed": seed,
        "current_cp": current_cp,
        "mode": MODE,
        "whole_below_tokens": min(DEFAULT_WHOLE_BELOW_TOKENS, per_rank // 2),
    }
    if out is not None:
        body = report_json(inputs, asdict(cost), outcomes, baseline, sentence, with_tasks=True)
        _write(out, json.dumps(body) + "\n")
    if svg is not None and subject.plans:
        _write(svg, plan_svg(subject.plans[0]))
    if as_json:
        body = report_json(inputs, asdict(cost), outcomes, baseline, sentence, with_tasks=False)
        typer.echo(json.dumps(body))
    else:
        _show(Console(), inputs, outcomes, baseline, sentence)


def _refuse_below_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {count}", f"{option} is at least 1.")


def _read_all(paths: Sequence[Path]) -> tuple[Sample, ...]:
    """Samples of all files, numbered through."""
    found = [sample for path in paths for sample in read_samples(path)]
    return tuple(replace(sample, id=number) for number, sample in enumerate(found))


def _refuse_too_long(samples: Sequence[Sample], cluster: Cluster) -> None:
    """Asked of all samples, drawn or not: training would meet every one of them."""
    longest = max(samples, key=lambda sample: sample.tokens)
    if longest.tokens > cluster.capacity_tokens:
        raise SampleTooLongError(longest.id, longest.tokens, cluster.tokens_per_rank, cluster.ranks)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror})", "Name a file in a folder that exists."
        ) from None


def _show(
    console: Console, inputs: dict[str, Any], outcomes: Sequence[Outcome], baseline: Outcome, sentence: str
) -> None:
    node = f"{inputs['ranks_per_node']} a node"
    line = (
        f"{inputs['model']} on {inputs['ranks']} × {inputs['hardware']} ({node}), "
        f"up to {inputs['tokens_per_rank']:,} tokens a rank; {inputs['samples']:,} lengths, "
        f"global batch {inputs['global_batch']}, {inputs['steps']} step{'s' if inputs['steps'] > 1 else ''}, "
        f"seed {inputs['seed']}"
    )
    console.print(Text(sentence, "bold"), highlight=False)
    console.print(Text(line, "dim"), highlight=False)
    console.print()
    console.print(policy_table(outcomes, baseline if baseline.plans else None))
    subject = outcomes[-1]
    if subject.plans:
        width = min(console.width, 110)
        console.print()
        console.print(plan_timeline(subject.plans[0], width=width, colour=console.is_terminal))
