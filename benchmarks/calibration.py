"""How well a calibration of this machine predicts: tasks left out of the fit, and tasks of real plans.

    python benchmarks/calibration.py [--nproc 2] [--seconds 90] [--short] [--out FILE] [--rows FILE]

Profiles the demo's model as `flexcp profile` does. Then the packs that the planner makes of the Python
sources for these ranks run too, in their measured clock (time on cores on a CPU), three times each, and are
predicted by the calibration, which has not seen them. Writes benchmarks/results/calibration.md.
"""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import numpy as np
from common import PYTHON_LIST, ROOT, head, table, write

import flexcp
from flexcp.core.lengths import read_lengths
from flexcp.core.sample import Sample
from flexcp.cost.fit import fit_cost
from flexcp.profiler.measure import Bench, Pack, of_all_ranks
from flexcp.profiler.session import Subject, profile
from flexcp.runtime.launch import launch
from flexcp.train.config import load_config
from flexcp.train.model import build_model, model_config
from flexcp.train.profiling import vocab_of

SEED, LONGEST, TOKENS_PER_RANK, BATCH, REPEATS = 0, 2048, 1024, 16, 3
FIGURES = "tasks", "mean error", "mean of absolute errors", "worst"


def rank(world, seconds, packs_wanted):
    """The profile; then load, degree and seconds of real packs."""
    config = load_config(ROOT / "examples/demo.toml")
    shape_config = model_config(config.model, vocab_of(config.data), LONGEST)
    model = build_model(shape_config, config.run, world.device)
    shape = flexcp.transformers.shape_of(shape_config)
    bench = Bench(model, shape_config.vocab_size, world)
    with flexcp.transformers.enable(model):
        found = profile(world, bench, Subject(shape, False, 4), longest_tokens=LONGEST, budget_s=seconds)
        packs = real_packs(world.size, found.calibration.cost, packs_wanted)
        rounds = [[bench.seconds(pack) for pack in packs] for _ in range(REPEATS)]
    times = of_all_ranks(list(zip(*rounds, strict=True)), bench.clock, world.device)
    return found, packs, times


def real_packs(ranks, cost, wanted):
    """What the planner makes of batches of Python sources that these ranks can hold."""
    capacity = ranks * TOKENS_PER_RANK
    lengths = [int(length) for length in read_lengths(PYTHON_LIST) if length <= capacity]
    random.Random(SEED).shuffle(lengths)
    planner = flexcp.Planner(flexcp.Cluster(ranks, TOKENS_PER_RANK), cost)
    packs = []
    while len(packs) < wanted and len(lengths) >= BATCH:
        batch, lengths = lengths[:BATCH], lengths[BATCH:]
        plan = planner([Sample(index, tokens) for index, tokens in enumerate(batch)])
        packs += [
            Pack(tuple(plan.samples[place] for place in task.samples), task.degree, plan.whole_below_tokens)
            for task in plan.tasks
        ]
    return packs[:wanted]


def main():
    """Measure, compare, write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--short", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, help="also keep the profiled tasks, .csv")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    seconds, wanted = (6.0, 4) if given.short else (given.seconds, 60)
    found, packs, times = launch(rank, given.nproc, (seconds, wanted))[0]
    if given.rows:
        given.rows.write_text(found.to_csv())
    calibration = found.calibration
    lines = head("Calibration: how well times are predicted", SEED, load)
    lines += [
        f"{given.nproc} ranks, {calibration.setup.clock} time; {calibration.measurements} tasks fitted.",
        f"Outliers: {', '.join(calibration.outliers) or 'none'}.",
        f"Cross-validated: {calibration.error_mean:.1%} on average, {calibration.error_max:.1%} at worst.",
        "",
        *table(("left out of the fit", *FIGURES), kinds(found)),
        "",
        f"Packs of plans of Python sources, {TOKENS_PER_RANK} tokens a rank, batches of {BATCH}:",
        "",
        *table(("never fitted, degree", *FIGURES), real(found, packs, times)),
    ]
    write("calibration", lines, given.out)


def kinds(found):
    """Cross-validated errors by kind of task."""
    errors = fit_cost(found.tasks, found.calibration.cost).errors
    rows = [("all", list(errors.values()))]
    for name, belongs in {
        "one sample": lambda load: load.samples == 1 and not spans(load),
        "4 samples, cut": lambda load: load.samples == 4 and load.cut_samples,
        "16 samples, cut": lambda load: load.samples == 16,
        "half of it attends both ways": spans,
        "4 samples, whole": lambda load: load.samples == 4 and not load.cut_samples,
    }.items():
        rows.append((name, [error for index, error in errors.items() if belongs(found.tasks[index].load)]))
    return [line(name, values) for name, values in rows if values]


def spans(load):
    """Whether some of it attends both ways."""
    return load.samples == 1 and load.pairs > load.tokens * (load.tokens + 1) // 2


def real(found, packs, times):
    """Errors of packs of real plans, by degree."""
    cost = found.calibration.cost
    errors = [cost.task_s(p.load, p.degree) / took - 1 for p, took in zip(packs, times, strict=True)]
    rows = [("all", errors)]
    for degree in sorted({pack.degree for pack in packs}):
        rows.append((degree, [e for e, pack in zip(errors, packs, strict=True) if pack.degree == degree]))
    return [line(name, values) for name, values in rows]


def line(name, errors):
    """Name, count, bias, mean, worst."""
    size = np.abs(errors)
    return name, len(errors), f"{np.mean(errors):+.1%}", f"{size.mean():.1%}", f"{size.max():.1%}"


if __name__ == "__main__":
    main()
