"""Tokens per second and device from 8 to 64 devices."""

from __future__ import annotations

from statistics import fmean

from flexcp.reproduce.fitting import (
    FITTED_SCALING,
    GLOBAL_BATCH,
    SCALING_CONTEXT,
    SCALING_DATA,
    SCALING_MODEL,
    Constants,
    fit_constants,
)
from flexcp.reproduce.layouts import Batch, cluster_of, cost_at, fair_static, padded_s, planned_s
from flexcp.reproduce.result import Column, ExperimentSetup, Result, Table, Value, off

RANKS = (8, 16, 32, 64)
SAMPLES_PER_RANK = GLOBAL_BATCH // RANKS[0]
# Our name of each published line.
SYSTEMS = {"deepspeed": "DeepSpeed, padded", "megatron": "Megatron, padded", "paper": "FCP, `paper`"}
OTHERS = {"fair": "fair static", "flexcp": "`flexcp`"}
# By ranks: throughput of each system with the batch that stays, and with the one that grows.
Rates = dict[int, tuple[dict[str, float], dict[str, float]]]


def run(setup: ExperimentSetup) -> Result:
    """Every system at every number of ranks, with a batch that stays and one that grows with the ranks."""
    constants = fit_constants(setup.published, setup.steps, setup.seed, setup.progress)
    data = constants.workload(SCALING_DATA).within(SCALING_CONTEXT)
    same = data.batches(GLOBAL_BATCH, setup.steps, setup.seed)
    rates: Rates = {}
    for number, ranks in enumerate(RANKS):
        setup.progress("scaling", number, len(RANKS))
        growing = data.batches(SAMPLES_PER_RANK * ranks, setup.steps, setup.seed)
        rates[ranks] = (throughput(same, ranks, constants), throughput(growing, ranks, constants))
    setup.progress("scaling", len(RANKS), len(RANKS))
    return Result("scaling", setup, constants, (_rate_table(rates, setup), _gain_table(rates, setup)), _NOTES)


def throughput(batches: tuple[Batch, ...], ranks: int, constants: Constants) -> dict[str, float]:
    """Thousand tokens per second and device of each system."""
    cluster, cost = cluster_of(ranks), cost_at(SCALING_MODEL, constants.speed)
    seconds = {
        "deepspeed": padded_s(batches, cluster, cost, "all-to-all", SCALING_CONTEXT),
        "megatron": padded_s(batches, cluster, cost, "ring", SCALING_CONTEXT),
        "paper": planned_s(batches, cluster, cost, "paper"),
        "fair": fair_static(batches, cluster, cost, SCALING_CONTEXT).seconds,
        "flexcp": planned_s(batches, cluster, cost, "flexcp"),
    }
    tokens = fmean(sum(sample.tokens for sample in batch) for batch in batches)
    return {name: tokens / (s + constants.fixed_s) / ranks / 1000 for name, s in seconds.items()}


def _rate_table(rates: Rates, setup: ExperimentSetup) -> Table:
    cases = [(ranks, name) for ranks in rates for name in (SYSTEMS | OTHERS)]
    rows = tuple(_rate_row(ranks, name, rates[ranks], setup) for ranks, name in cases)
    columns = (
        Column("ranks", "ranks", "d"),
        Column("system", "system"),
        Column("published", "published", ".2f"),
        Column("same", f"ours, batch {GLOBAL_BATCH}", ".2f"),
        Column("same_off", "off", "+.1%"),
        Column("growing", f"ours, {SAMPLES_PER_RANK} a device", ".2f"),
        Column("growing_off", "off", "+.1%"),
    )
    number = cases.index((FITTED_SCALING, "deepspeed"))
    title = f"Thousand tokens per second and device, {SCALING_MODEL}"
    return Table(title, columns, rows, frozenset({(number, "same"), (number, "growing")}))


def _rate_row(
    ranks: int, name: str, ours: tuple[dict[str, float], dict[str, float]], setup: ExperimentSetup
) -> dict[str, Value]:
    same, growing = (rate[name] for rate in ours)
    row: dict[str, Value] = {
        "ranks": ranks,
        "system": (SYSTEMS | OTHERS)[name],
        "same": same,
        "growing": growing,
    }
    known = next((row for row in setup.published.scaling if row.ranks == ranks), None)
    if known is None or name in OTHERS:
        return row
    lines = {
        "deepspeed": known.deepspeed,
        "megatron": known.megatron,
        "paper": known.deepspeed * known.fcp_over_deepspeed,
    }
    expected = lines[name]
    return {
        **row,
        "published": expected,
        "same_off": off(same, expected),
        "growing_off": off(growing, expected),
    }


def _gain_table(rates: Rates, setup: ExperimentSetup) -> Table:
    known = {row.ranks: row.fcp_over_deepspeed for row in setup.published.scaling}
    rows = tuple(
        {
            "ranks": ranks,
            "published": known.get(ranks),
            "paper": same["paper"] / same["deepspeed"],
            "paper_growing": growing["paper"] / growing["deepspeed"],
            "flexcp": same["flexcp"] / same["deepspeed"],
            "flexcp_growing": growing["flexcp"] / growing["deepspeed"],
            "fair": same["flexcp"] / same["fair"],
            "fair_growing": growing["flexcp"] / growing["fair"],
        }
        for ranks, (same, growing) in rates.items()
    )
    grown = f", {SAMPLES_PER_RANK} a device"
    columns = (
        Column("ranks", "ranks", "d"),
        Column("published", "FCP / DeepSpeed, published", ".2f"),
        Column("paper", "`paper` / DeepSpeed", ".2f"),
        Column("paper_growing", f"the same{grown}", ".2f"),
        Column("flexcp", "`flexcp` / DeepSpeed", ".2f"),
        Column("flexcp_growing", f"the same{grown}", ".2f"),
        Column("fair", "`flexcp` / fair static", ".2f"),
        Column("fair_growing", f"the same{grown}", ".2f"),
    )
    return Table("Gains", columns, rows)


_NOTES = (
    (
        f"The paper names neither model nor data nor batch here: {SCALING_MODEL} and {SCALING_DATA} are "
        f"assumed, and both ways to scale are shown: a global batch of {GLOBAL_BATCH} at every size, and "
        f"{SAMPLES_PER_RANK} samples a device. Eight devices are alike in both."
    ),
    (
        f"8 ranks of 8,192 tokens hold {SCALING_CONTEXT:,}; the context is cut to that at every size, so "
        "that all do the same work. Static degree 8."
    ),
)
