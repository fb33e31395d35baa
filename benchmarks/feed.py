"""Planning beside a busy training loop: what a step of 512 samples on 64 ranks waits for its plan.

    python benchmarks/feed.py [LENGTHS[:COLUMN]]

One process stands for rank 0. Each step keeps the interpreter busy without a pause, which is the hardest
case: a loop that waits for a device leaves the lock free. While it runs, the plan of the second step after it
is made, and the plan of the next one is read and its own share cut, as `runtime.feed` does. Compared with
planning in a thread of the same process. Writes benchmarks/results/feed.md.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import flexcp
from flexcp.core.lengths import read_lengths
from flexcp.core.plan import Plan
from flexcp.core.sample import samples_from_lengths
from flexcp.runtime.batches import load_examples, make_micro_batch
from flexcp.runtime.planning import Planning

ROOT = Path(__file__).parents[1]
SEED, SAMPLES, RANKS, TOKENS, STEPS = 0, 512, 64, 8192, 12
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

    def exchange(self, ranks):
        """Nothing will be sent."""
        return ranks


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
    for step in range(STEPS):
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


HEAD = [
    "| planning | plan or data late | plan ms | opening a step, ms | of these steps | of predicted ones |",
    "|---|---|---|---|---|---|",
]


def header(name, alone_s, predicted_s):
    """What this was run with."""
    return [
        "# Planning beside training",
        "",
        f"`python benchmarks/feed.py`, seed {SEED}; flexcp {flexcp.__version__},",
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores.",
        f"{name}: {SAMPLES} samples on {RANKS} simulated ranks of {TOKENS} tokens;",
        f"{STEPS} steps, three runs of each way, interleaved. Alone, a step keeps the interpreter busy for",
        f"{alone_s:.2f} s; on the ranks that are planned for (Qwen3-8B, H100 preset) it would take",
        f"{predicted_s:.2f} s. Wall-clock medians over all steps but the first of a run.",
    ]


def main():
    """Run both ways, interleaved, and write the page."""
    file, _, column = (sys.argv[1:] or [str(ROOT / "tests/data/python_source_lengths_qwen.json")])[
        0
    ].partition(":")
    lengths = read_lengths(file, column or None)
    draw = np.random.default_rng(SEED)
    batches = [samples_from_lengths(draw.choice(lengths, SAMPLES).tolist()) for _ in range(STEPS + 2)]
    begun_s = time.perf_counter()
    busy(10**6)
    turns = int(10**6 / (time.perf_counter() - begun_s))  # about a second a step
    alone_s = []
    found = {"in a process": [], "in a thread": []}
    for _ in range(3):
        begun_s = time.perf_counter()
        busy(turns)
        alone_s.append(time.perf_counter() - begun_s)
        found["in a process"].append(run(batches, PLANNER, turns))
        found["in a thread"].append(run(batches, InThread(), turns))
    predicted_s = statistics.median(PLANNER(batch).step_s for batch in batches)
    page = [*header(Path(file).stem, min(alone_s), predicted_s), "", *HEAD]
    for how, runs in found.items():
        waits_s, busy_s, plans_s, late = ([s for one in runs for s in one[k][1:]] for k in range(4))
        share = sum(waits_s) / (sum(waits_s) + sum(busy_s))
        wait_s = statistics.median(waits_s)
        page.append(
            f"| {how} | {sum(late)} of {len(late)} | {1e3 * statistics.median(plans_s):.0f} | "
            f"{1e3 * wait_s:.1f} | {share:.2%} | {wait_s / predicted_s:.2%} |"
        )
    first = statistics.median(one[0][0] for one in found["in a process"])
    page += ["", f"Start of the planner process, first plan and first data: {first:.2f} s, once."]
    (ROOT / "benchmarks/results/feed.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page))


class InThread:
    """The same planner as a callable of one's own, which plans in a thread."""

    cluster = PLANNER.cluster

    def __call__(self, samples):
        """Plan one global batch."""
        return PLANNER(samples)


if __name__ == "__main__":
    main()
