"""Planning beside a busy training loop: what a step of 512 samples on 64 ranks waits for its plan.

    python benchmarks/feed.py [LENGTHS[:COLUMN]] [--short] [--out FILE]

One process stands for rank 0. Each step keeps the interpreter busy without a pause, which is the hardest
case: a loop that waits for a device leaves the lock free. While it runs, the plan of the second step after it
is made, and the plan of the next one is read and its own share cut, as `runtime.feed` does. Compared with
planning in a thread of the same process. Writes benchmarks/results/feed.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import PYTHON_LIST, head, lists, table, write

import flexcp
from flexcp.core.plan import Plan
from flexcp.core.sample import samples_from_lengths
from flexcp.runtime.batches import load_examples, make_micro_batch
from flexcp.runtime.planning import Planning

SEED, SAMPLES, RANKS, TOKENS = 0, 512, 64, 8192
COLUMNS = "planning", "late", "plan ms", "opening a step, ms", "of these steps", "of predicted ones"
PLANNER = flexcp.Planner(
    flexcp.Cluster(RANKS, TOKENS), flexcp.cost_model(flexcp.model_shape("qwen3-8b"), flexcp.hardware("h100"))
)


class Tokens:
    """Samples of zeros, of the lengths that the plan was made for."""

    def __init__(self, samples):
        self.lengths = [sample.tokens for sample in samples]

    def __getitem__(self, index):
        return {"input_ids": np.zeros(self.lengths[index], dtype=np.int64)}


class OneRank:
    """A transport that only knows which rank it is."""

    rank = 0

    def exchange(self, ranks, kind="ring"):
        """Nothing will be sent."""
        return ranks, kind


def busy(turns):
    """Hold the interpreter for a fixed amount of work."""
    total = 0
    for turn in range(turns):
        total += turn
    return total


def ready(made, samples):
    """What rank 0's background does with a plan."""
    plan = Plan.from_json(made.result().text)
    examples = load_examples(Tokens(samples), plan, 0)
    return [make_micro_batch(plan, plan.tasks[i], examples, OneRank()) for i in plan.tasks_of(0)]


def run(batches, planner, turns):
    """Step by step: seconds waited, busy and planning, and whether there was anything to wait for."""
    planning, thread = Planning(planner, print), ThreadPoolExecutor(1)
    waits_s, busy_s, plans_s, late = [], [], [], []
    made = [planning.submit(batches[0]), planning.submit(batches[1])]
    prepared = thread.submit(ready, made[0], batches[0])
    for step in range(len(batches) - 2):
        begun_s = time.perf_counter()
        late.append(not prepared.done())
        prepared.result()
        made.append(planning.submit(batches[step + 2]))
        prepared = thread.submit(ready, made[step + 1], batches[step + 1])
        waited_s = time.perf_counter()
        busy(turns)
        busy_s.append(time.perf_counter() - waited_s)
        waits_s.append(waited_s - begun_s)
        plans_s.append(made[step].result().plan_s)
    prepared.result()
    planning.close()
    thread.shutdown()
    return waits_s, busy_s, plans_s, late


def main():
    """Run both ways, interleaved, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lengths", nargs="?", default=str(PYTHON_LIST))
    parser.add_argument("--short", action="store_true", help="a few short steps, to see that it runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    steps, runs, seconds = (3, 1, 0.1) if given.short else (12, 3, 1.0)
    [(name, lengths)] = lists([given.lengths]).items()
    draw = np.random.default_rng(SEED)
    batches = [samples_from_lengths(draw.choice(lengths, SAMPLES).tolist()) for _ in range(steps + 2)]
    begun_s = time.perf_counter()
    busy(10**6)
    turns = int(seconds * 10**6 / (time.perf_counter() - begun_s))
    alone_s = []
    found = {"in a process": [], "in a thread": []}
    for _ in range(runs):
        begun_s = time.perf_counter()
        busy(turns)
        alone_s.append(time.perf_counter() - begun_s)
        found["in a process"].append(run(batches, PLANNER, turns))
        found["in a thread"].append(run(batches, InThread(), turns))
    predicted_s = statistics.median(PLANNER(batch).step_s for batch in batches)
    first = statistics.median(one[0][0] for one in found["in a process"])
    page = [
        *head("Planning beside training", SEED, load),
        f"{name}: {SAMPLES} samples on {RANKS} simulated ranks of {TOKENS} tokens;",
        f"{steps} steps, runs of each way: {runs}, interleaved. Alone, a step keeps the interpreter busy for",
        f"{min(alone_s):.2f} s; on the ranks that are planned for (Qwen3-8B, H100 preset) it would take",
        f"{predicted_s:.2f} s. Wall-clock medians over all steps but the first of a run.",
        "",
        *table(COLUMNS, [row(how, of, predicted_s) for how, of in found.items()]),
        "",
        f"Start of the planner process, first plan and first data: {first:.2f} s, once.",
    ]
    write("feed", page, given.out)


def row(how, runs, predicted_s):
    """One way of planning: what a step waited."""
    waits_s, busy_s, plans_s, late = ([s for one in runs for s in one[k][1:]] for k in range(4))
    wait_s, share = statistics.median(waits_s), sum(waits_s) / (sum(waits_s) + sum(busy_s))
    return (
        how,
        f"{sum(late)} of {len(late)}",
        f"{1e3 * statistics.median(plans_s):.0f}",
        f"{1e3 * wait_s:.1f}",
        f"{share:.2%}",
        f"{wait_s / predicted_s:.2%}",
    )


class InThread:
    """The same planner as a callable of one's own, which plans in a thread."""

    cluster = PLANNER.cluster

    def __call__(self, samples):
        """Plan one global batch."""
        return PLANNER(samples)


if __name__ == "__main__":
    main()
