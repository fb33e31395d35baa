"""What a simulated step costs, by samples and ranks: processor time, without and beside the planning.

    python benchmarks/simulator.py [--short] [--out PAGE]

Lengths are drawn from the Python source list with replacement; the step runs alone, and with jitter and
shared uplinks, where tasks change each other's pace. Writes benchmarks/results/simulator.md.
"""

from __future__ import annotations

import argparse
import os
import random
import time

from common import PYTHON_LIST, head, table, write

from flexcp.core.cluster import Cluster
from flexcp.core.lengths import read_lengths
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import samples_from_lengths
from flexcp.cost import cost_model, hardware
from flexcp.planner import make_plan
from flexcp.simulate import Conditions, simulate

SEED = 0
SCALES = ((512, 64), (8_192, 1_024), (131_072, 16_384))
TOKENS_PER_RANK = 8192
COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
DAYS = {"alone": Conditions(), "jitter, 4 uplinks a node": Conditions(jitter=0.05, uplinks=4)}
REPEATS = 3


def main() -> None:
    """Plan, simulate, write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="the smallest step, once: does it run?")
    parser.add_argument("--out")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    scales, repeats = (SCALES[:1], 1) if given.short else (SCALES, REPEATS)
    rows = [row for samples, ranks in scales for row in measured(samples, ranks, repeats)]
    columns = ("samples", "ranks", "tasks", "day", "simulated ms", "planned ms")
    page = [
        *head("What a simulated step costs", SEED, load),
        f"Policy `flexcp`, {TOKENS_PER_RANK:,} tokens a rank; milliseconds of processor time, the least of",
        f"{repeats}, from a finished plan to the report of its step; planning beside it.",
        "",
        *table(columns, rows),
    ]
    write("simulator", page, given.out)


def measured(samples, ranks, repeats):
    """A row for each kind of day."""
    pool = read_lengths(PYTHON_LIST).tolist()
    lengths = random.Random(SEED).choices(pool, k=samples)
    started = time.process_time()
    plan = make_plan(samples_from_lengths(lengths), Cluster(ranks, TOKENS_PER_RANK), COST)
    planned_s = time.process_time() - started
    for day, conditions in DAYS.items():
        least_s = min(simulated_s(plan, conditions) for _ in range(repeats))
        cells = (f"{samples:,}", f"{ranks:,}", f"{len(plan.tasks):,}", day)
        yield [*cells, f"{1e3 * least_s:.1f}", f"{1e3 * planned_s:.0f}"]


def simulated_s(plan, conditions):
    """Processor seconds of one simulated step."""
    started = time.process_time()
    (step,) = simulate([plan], COST, conditions)
    assert step.report.step_s > 0
    return time.process_time() - started


if __name__ == "__main__":
    main()
