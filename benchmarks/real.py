"""Real compute, two ranks: `flexcp`, the fair static layout and `paper` train in turn on the same samples.

    python benchmarks/real.py [LENGTHS[:COLUMN] ...] [--short] [--out FILE]

Lists: Python source files and a mix of 300, 6,000 and 50,000 tokens, all lengths an eighth, so that a step of
a small Qwen3 takes seconds on a core. The layouts train in the same two processes, one core each, step by
step in turn. On two ranks static context parallelism is balanced already; what is left to gain is what
short samples pay for being cut. Wall-clock, and the processor time of both ranks. Writes
benchmarks/results/real.md.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from common import head, lists, median_of_pairs, paired, table, write
from small import RandomTokens, small_cost, small_model

import flexcp
from flexcp.runtime.launch import launch

SEED, TOKENS, SCALE = 0, 4096, 8
POLICIES = ("flexcp", "static", "paper")
MIX = (300,) * 12 + (6_000,) * 3 + (50_000,)


def rank(world, lengths, batch, tokens, steps):
    """Reports and processor seconds of this rank by policy, the first step left out."""
    torch.set_num_threads(1)
    runs = {}
    for policy in POLICIES:
        model = small_model()
        planner = flexcp.Planner(flexcp.Cluster(world.size, tokens), small_cost(), policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine = flexcp.Engine(
            model,
            optimizer,
            planner,
            RandomTokens(lengths),
            global_batch=batch,
            steps=steps + 1,
            seed=SEED,
        )
        runs[policy] = engine, iter(engine)
    found = {policy: [] for policy in POLICIES}
    for index in range(steps + 1):
        turn = index % len(POLICIES)
        for policy in POLICIES[turn:] + POLICIES[:turn]:
            dist.barrier()
            found[policy].append(one_step(*runs[policy]))
    for engine, _ in runs.values():
        engine.close()
    return {policy: made[1:] for policy, made in found.items()}


def one_step(engine, steps):
    """The next step of one engine, and the processor time of this process during it."""
    with flexcp.transformers.enable(engine.model):
        begun_s = time.process_time()
        step = next(steps)
        for micro in step:
            step.backward(engine.model(**micro.inputs), micro)
        return step.finish(), time.process_time() - begun_s


def section(name, batch, ranks):
    """The page of one list; `ranks` holds what each rank found."""
    wall = {p: [report.step_s for report, _ in ranks[0][p]] for p in POLICIES}
    cpu = {
        p: [sum(pair) for pair in zip(*([s for _, s in r[p]] for r in ranks), strict=True)] for p in POLICIES
    }
    rows = []
    for policy in POLICIES:
        degrees = {}
        for report, _ in ranks[0][policy]:
            for degree, count in report.degrees.items():
                degrees[degree] = degrees.get(degree, 0) + count
        rows.append(
            [
                policy,
                ", ".join(f"{count} × {degree}" for degree, count in sorted(degrees.items())),
                f"{np.mean(wall[policy]):.2f}",
                paired(wall[policy], wall["flexcp"]) if policy != "flexcp" else "",
                f"{median_of_pairs(wall[policy], wall['flexcp']):.3f}" if policy != "flexcp" else "",
                f"{np.mean(cpu[policy]):.2f}",
                paired(cpu[policy], cpu["flexcp"]) if policy != "flexcp" else "",
                f"{predicted(ranks, policy) / predicted(ranks, 'flexcp'):.3f}",
            ]
        )
    columns = [
        "policy",
        "tasks × degree",
        "step s",
        "wall / flexcp",
        "median",
        "CPU s",
        "CPU / flexcp",
        "planned",
    ]
    return [f"## {name}: {batch} samples a step, {len(wall['flexcp'])} steps", "", *table(columns, rows), ""]


def predicted(ranks, policy):
    """Seconds of all steps by the plans."""
    return sum(report.predicted_s for report, _ in ranks[0][policy])


def main():
    """Run all lists and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lists", nargs="*")
    parser.add_argument("--short", action="store_true", help="one step of short samples: does it run?")
    parser.add_argument("--out")
    given = parser.parse_args()
    load, page = os.getloadavg()[0], []
    scale, tokens, steps = (128, 512, 1) if given.short else (SCALE, TOKENS, 12)
    batches = [(name, lengths, 64) for name, lengths in lists(given.lists).items()]
    batches.append(("mix of 300, 6,000 and 50,000 tokens", np.array(MIX * 20), len(MIX)))
    for name, lengths, batch in batches:
        scaled = np.maximum(1, lengths // scale)
        fitting = scaled[scaled <= 2 * tokens]
        ranks = launch(rank, 2, (fitting, batch, tokens, steps))
        page += section(f"{name}, over {scale}", batch, ranks)
        print(*page[-6:], sep="\n", flush=True)
    notes = [
        "`wall / flexcp`, `CPU / flexcp`: ratio of the sums (least and largest step); above 1, `flexcp` is",
        "faster. CPU is the processor time of both ranks: what rings cost, also on a busy machine.",
        "`planned`: the ratio that the plans predict. `tasks × degree` counts over all steps.",
        "",
    ]
    write("real", [*head("Real compute on two ranks", SEED, load), *notes, *page], given.out)


if __name__ == "__main__":
    main()
