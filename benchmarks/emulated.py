"""Steps of the real runtime on an emulated device: what `flexcp` gains over other policies, by the clock.

    python benchmarks/emulated.py [LENGTHS[:COLUMN] ...] [--worlds 8x2x4096 ...] [--short] [--out FILE]

Emulation: arithmetic and links take the time of the cost model by sleeping (`device.py`). Planning, reading
and cutting of data, messages, groups, gradient reduction and every wait are those of `flexcp.Engine`, free or
in lockstep. All policies train in the same processes, step by step in turn, on the same samples. Which worlds
were emulated was chosen, so the page also holds what plans of all worlds around them promise. Writes
benchmarks/results/emulated.md.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from common import head, lists, paired, table, write
from device import Machine, StandIn

import flexcp
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import Sample
from flexcp.cost import cost_model, hardware
from flexcp.runtime.launch import launch
from flexcp.runtime.order import batch_indices

SEED, SAMPLES = 0, 8  # samples of a step: 8 a rank
SHAPE, HARDWARE = model_shape("qwen3-8b"), hardware("h100")
COST = cost_model(SHAPE, HARDWARE, checkpointing=False)
POLICIES = ("flexcp", "paper", "static", "ulysses")
MODES = ("free-running", "lockstep")
# Ranks x ranks a node x tokens a rank; with nodes of 2, groups of a small world cross nodes as those of a
# large one do.
WORLDS = ("8x2x4096", "16x2x4096", "8x2x8192", "16x2x8192")
GRID = [(ranks, node, tokens) for ranks in (8, 16) for node in (2, 8) for tokens in (4096, 8192, 16384)]


class Lengths:
    """Samples of zeros of given lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": np.zeros(self.lengths[index], dtype=np.int64)}


def rank(world, lengths, node, tokens, steps):
    """One rank of all runs: reports by mode and policy, the first step left out."""
    torch.set_num_threads(1)
    cost = COST.at_speed(1 / slowness(world.size))
    found = {}
    for mode in MODES:
        runs = {}
        for policy in POLICIES:
            machine = Machine(cost, SHAPE, node)
            model = StandIn(machine)
            planner = flexcp.Planner(flexcp.Cluster(world.size, tokens, node), cost, policy=policy, mode=mode)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            batch = SAMPLES * world.size
            engine = flexcp.Engine(
                model, optimizer, planner, Lengths(lengths), global_batch=batch, steps=steps + 1, seed=SEED
            )
            runs[policy] = engine, iter(engine), machine.device
        reports = {policy: [] for policy in POLICIES}
        for index in range(steps + 1):
            turn = index % len(POLICIES)
            for policy in POLICIES[turn:] + POLICIES[:turn]:
                dist.barrier()
                reports[policy].append(one_step(*runs[policy]))
        for engine, _, _ in runs.values():
            engine.close()
        found[mode] = {policy: made[1:] for policy, made in reports.items()}
    return found if world.rank == 0 else None


def slowness(ranks):
    """Times slower than the real device: the more ranks share the cores, so that the host weighs the same."""
    return max(1.0, ranks / 8)


def one_step(engine, steps, device):
    """Run the next step of one engine."""
    step = next(steps)
    device.late_s = 0.0
    coming, taken = iter(step), []
    while True:
        taken.clear()
        device.block(lambda: taken.extend(islice(coming, 1)))  # in lockstep it waits for the others' wave
        if not taken:
            return step.finish()
        [micro] = taken
        step.backward(engine.model(**micro.inputs, ranks=micro.task.ranks), micro)


def section(name, ranks, node, tokens, found):
    """The page of one world."""
    gains, steps = [], []
    for mode, reports in found.items():
        ours = [report.step_s for report in reports["flexcp"]]
        for policy, theirs in reports.items():
            walls = [report.step_s for report in theirs]
            predicted = sum(report.predicted_s for report in theirs)
            work = sum(report.measured_s for report in theirs)
            bound = sum(report.bound_s for report in theirs)
            gains.append(
                [
                    mode,
                    policy,
                    f"{sum(walls) / len(walls):.3f}",
                    "" if policy == "flexcp" else paired(walls, ours),
                    "" if policy == "flexcp" else ratio(theirs, reports["flexcp"], "predicted_s"),
                    f"{work / predicted - 1:+.1%}",
                    f"{sum(walls) / predicted - 1:+.1%}",
                    f"{predicted / bound:.3f}",
                    f"{max(report.exposed_s for report in theirs) * 1e3:.1f}",
                ]
            )
        for index, report in enumerate(reports["flexcp"]):
            pairs = [f"{reports[p][index].step_s:.3f} ({reports[p][index].predicted_s:.3f})" for p in reports]
            steps.append([mode, report.step, *pairs])
    columns = [
        "mode",
        "policy",
        "step s",
        "policy / flexcp",
        "predicted",
        "tasks",
        "step",
        "gap",
        "wait ms",
    ]
    return [
        f"## {name}: {ranks} ranks, {node} a node, {tokens} tokens a rank, {SAMPLES * ranks} samples a step",
        "",
        f"All times {slowness(ranks):g} × those of the device emulated.",
        "",
        *table(columns, gains),
        "",
        "Every step, seconds measured (predicted):",
        "",
        *table(["mode", "step", *POLICIES], steps),
        "",
    ]


def promised(name, lengths, steps):
    """What the plans of the same steps say in all worlds of the grid, emulated or not."""
    rows = []
    for ranks, node, tokens in GRID:
        fitting = lengths[lengths <= ranks * tokens]
        for mode in MODES:
            cluster = flexcp.Cluster(ranks, tokens, node)
            step_s = dict.fromkeys(("flexcp", "paper", "static"), 0.0)
            bound_s = 0.0
            for index in range(1, steps + 1):
                chosen = batch_indices(len(fitting), SAMPLES * ranks, SEED, index)
                samples = [Sample(int(i), int(fitting[i])) for i in chosen]
                for policy in step_s:
                    plan = flexcp.Planner(cluster, COST, policy=policy, mode=mode)(samples)
                    step_s[policy] += plan.step_s
                bound_s += plan.bound_s
            ratios = [f"{step_s[policy] / step_s['flexcp']:.3f}" for policy in ("paper", "static")]
            rows.append([ranks, node, tokens, mode, *ratios, f"{step_s['static'] / bound_s:.3f}"])
    columns = [
        "ranks",
        "a node",
        "tokens a rank",
        "mode",
        "paper / flexcp",
        "static / flexcp",
        "static / bound",
    ]
    return [f"## {name}: what plans promise, all worlds", "", *table(columns, rows), ""]


def ratio(theirs, ours, field):
    """Of the sums of a field of two lists of reports."""
    return f"{sum(getattr(r, field) for r in theirs) / sum(getattr(r, field) for r in ours):.3f}"


NOTES = """**This is an emulation.** Arithmetic and links take the time that the cost model gives them
(Qwen3-8B on the H100 preset, no recomputation) by sleeping; messages really travel over gloo, 4,608 times
smaller than those they stand for. Planning, data, messages, groups, reduction and all waiting, also that
between waves (lockstep), are the engine's own. A sleep that ends late is made up for by the next ones.
Policies take turns, step by step, in the same processes, on the same samples; each one's first step is left
out.

- `step s`: wall-clock of a whole step, mean.
- `policy / flexcp`: ratio of the sums; least and largest step. `predicted`: the same by the plans.
- `tasks`: first task to end of the last, against the plan's step. `step`: the whole step (opening, tasks,
  reduction, optimizer) against it.
- `gap`: the plan's step over the bound that no plan can beat; so no policy can be faster than `static` by
  more than static's gap.
- `wait ms`: longest wait of a step for plan and data.

`static` is the best single degree, rings, no padding, balanced packs; `ulysses` the same by all-to-all.

The worlds that were emulated are chosen from the table of promises: nodes of 2, where the groups of few ranks
cross nodes as those of many do, and few tokens a rank. They favour `flexcp`. On one node of 8, or with many
tokens a rank, `static` plans so near to the bound that no plan could gain much.
"""


def main():
    """Run all worlds and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lists", nargs="*")
    parser.add_argument("--worlds", nargs="+", default=WORLDS, help="ranks x ranks a node x tokens a rank")
    parser.add_argument("--short", action="store_true", help="two ranks, one step: does it run?")
    parser.add_argument("--out")
    given = parser.parse_args()
    load, page = os.getloadavg()[0], []
    worlds, steps = (("2x1x512",), 1) if given.short else (given.worlds, 4)
    for name, lengths in lists(given.lists).items():
        page += promised(name, lengths, steps)
        for world in worlds:
            ranks, node, tokens = map(int, world.split("x"))
            begun_s = time.perf_counter()
            fitting = lengths[lengths <= ranks * tokens]
            found = launch(rank, ranks, (fitting, node, tokens, steps))[0]
            page += section(name, ranks, node, tokens, found)
            print(f"{name}, {ranks} ranks: {time.perf_counter() - begun_s:.0f} s", flush=True)
    write("emulated", [*head("Emulated device", SEED, load), *NOTES.splitlines(), "", *page], given.out)


if __name__ == "__main__":
    main()
