"""The extremely unbalanced batch: one sample of 128k and many of 2-8k; and the released generator's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexcp.core.sample import samples_from_lengths
from flexcp.reproduce.fitting import Constants, fit_constants
from flexcp.reproduce.layouts import (
    TOKENS_PER_RANK,
    Batch,
    Times,
    cluster_of,
    cost_at,
    every_layout,
)
from flexcp.reproduce.result import Column, ExperimentSetup, Result, Table
from flexcp.reproduce.workloads import CONTEXT_TOKENS

MODEL, RANKS = "qwen3-8b", 64  # the paper names no model for this row
SHORT_TOKENS = (2048, 8192)
MANY = (63, 127, 255, 511)
MAIN_SHORT = 127  # the released generator makes micro-batches of 64 or 128
# The released generator (FCP's development log).
RELEASED_SAMPLES, RELEASED_STEPS = 64, 9
_RELEASED_CAP, _RELEASED_SPREAD, _RELEASED_UNIFORM = 4096, 0.1, (512, 4096)


def run(setup: ExperimentSetup) -> Result:
    """Both tables."""
    constants = fit_constants(setup.published, setup.steps, setup.seed, setup.progress)
    parts = len(MANY) + len(setup.published.released)
    by_count = []
    for number, short in enumerate(MANY):
        setup.progress("extreme batches", number, parts)
        by_count.append(unbalanced(short, setup, constants))
    released = []
    for number, row in enumerate(setup.published.released):
        setup.progress("extreme batches", len(MANY) + number, parts)
        released.append(times(released_batches(setup.seed), row.model, constants))
    setup.progress("extreme batches", parts, parts)
    tables = (_count_table(by_count, setup), _released_table(released, setup))
    return Result("extreme", setup, constants, tables, _NOTES)


def unbalanced(short: int, setup: ExperimentSetup, constants: Constants) -> Times:
    """One sample of 128k, `short` of 2-8k, uniform."""
    random = np.random.default_rng(setup.seed)
    low, high = SHORT_TOKENS
    draws = random.integers(low, high, size=(setup.steps, short), endpoint=True)
    batches = [samples_from_lengths([CONTEXT_TOKENS, *row.tolist()]) for row in draws]
    return times(batches, MODEL, constants)


def released_batches(seed: int) -> list[Batch]:
    """The generator of the released benchmark, at 64 ranks and 64 samples.

    With probability 1/2 one sample of 131072 and the rest equal shares of what the ranks still hold, at most
    4096 and spread by 10 %; otherwise all uniform from 512 to 4096.
    """
    random = np.random.default_rng(seed)
    share = min(_RELEASED_CAP, (RANKS * TOKENS_PER_RANK - CONTEXT_TOKENS) // (RELEASED_SAMPLES - 1))
    batches: list[Batch] = []
    for _ in range(RELEASED_STEPS):
        if random.random() < 0.5:
            spread = 1 + _RELEASED_SPREAD * random.uniform(-1, 1, RELEASED_SAMPLES - 1)
            lengths = [CONTEXT_TOKENS, *np.rint(share * spread).astype(int).tolist()]
        else:
            lengths = random.integers(*_RELEASED_UNIFORM, size=RELEASED_SAMPLES, endpoint=True).tolist()
        batches.append(samples_from_lengths(lengths))
    return batches


def times(batches: Sequence[Batch], model: str, constants: Constants) -> Times:
    """Every layout on the same batches."""
    return every_layout(
        batches,
        cluster_of(RANKS),
        cost_at(model, constants.speed),
        exchange="ring",
        context_tokens=CONTEXT_TOKENS,
        longest=CONTEXT_TOKENS,
        fixed_s=constants.fixed_s,
    )


_TIMES = (
    Column("padded_s", "padded s", ".2f"),
    Column("fair_s", "fair static s", ".2f"),
    Column("paper_s", "`paper` s", ".2f"),
    Column("flexcp_s", "`flexcp` s", ".2f"),
)
_RATIOS = (
    Column("published", "× published", ".2f"),
    Column("padded_over_paper", "× `paper`", ".2f"),
    Column("padded_over_flexcp", "× `flexcp`", ".2f"),
    Column("fair_over_paper", "× fair, `paper`", ".2f"),
    Column("fair_over_flexcp", "× fair, `flexcp`", ".2f"),
)


def _count_table(ours: list[Times], setup: ExperimentSetup) -> Table:
    rows = tuple(
        {"short": f"{short}", "published": setup.published.extreme_ratio, **t.values()}
        for short, t in zip(MANY, ours, strict=True)
    )
    columns = (Column("short", "samples of 2–8k"), *_TIMES, *_RATIOS)
    return Table(f"One sample of 131,072 and many of 2–8k, {MODEL}", columns, rows)


def _released_table(ours: list[Times], setup: ExperimentSetup) -> Table:
    rows = tuple(
        {"model": row.model, "published": row.ratio, **t.values()}
        for row, t in zip(setup.published.released, ours, strict=True)
    )
    title = f"The generator of the released code, {RELEASED_SAMPLES} samples, mean of {RELEASED_STEPS} steps"
    return Table(title, (Column("model", "model"), *_TIMES, *_RATIOS), rows)


_NOTES = (
    f"The paper gives neither model nor number of short samples; the main table takes {MAIN_SHORT}.",
    "A ratio is padded over policy, unless it says fair.",
    "Seconds of the second table are not compared: the log does not say how many micro-batches made a step.",
)
