"""Replay: the processor time of every real task, put through the dependencies of the plans of eight ranks.

    python benchmarks/replay.py [LENGTHS[:COLUMN] ...] [--short] [--out FILE]

A small Qwen3 runs each rank's share of each task alone, in one process: processor time of forward and
backward, the faster of two runs. Messages arrive at once and cost nothing, so wide rings are shown better
than they are. A task takes as long as its slowest member. These times go through `simulate`, free-running
and in lockstep. Costs are fitted to the tasks of a first batch, which does not count. Writes
benchmarks/results/replay.md.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import replace

import numpy as np
import torch
from common import head, lists, paired, table, write
from small import RandomTokens, small_cost, small_model

import flexcp
from flexcp.attention import Buffers
from flexcp.core.sample import Sample
from flexcp.cost import Link
from flexcp.cost.fit import fit_cost
from flexcp.cost.measurements import Measurement
from flexcp.cost.model import Load
from flexcp.planner import make_plan
from flexcp.runtime.batches import load_examples, make_micro_batch
from flexcp.runtime.loss import token_loss_sum
from flexcp.runtime.order import batch_indices
from flexcp.simulate.tasks import run_tasks

SEED, RANKS, SCALE, TOKENS, SAMPLES = 0, 8, 8, 1024, 8
POLICIES, MODES = ("flexcp", "paper", "static"), ("free-running", "lockstep")
FREE = Link(math.inf, 0.0)


class Alone:
    """A transport whose other ranks have always said zeros already."""

    def __init__(self):
        self.rank = 0
        self.buffers = Buffers()

    def exchange(self, ranks, kind):
        """The group as the current rank sees it."""
        return _Group(self, ranks, kind)


class _Group:
    def __init__(self, transport, ranks, kind):
        self.member, self.degree, self.kind = ranks.index(transport.rank), len(ranks), kind
        self.buffers = transport.buffers

    def post(self, sends, receives, lane=0):
        """Everything is there."""
        for message, _ in receives:
            message.payload.zero_()
        return self

    def wait(self):
        """It is."""


def task_seconds(plan, data, model, transport):
    """Processor seconds of every task: of its slowest member, each the faster of two runs."""
    seconds = np.zeros(len(plan.tasks))
    for rank in range(plan.cluster.ranks):
        transport.rank = rank
        examples = load_examples(data, plan, rank)
        for index in plan.tasks_of(rank):
            runs = [share_seconds(plan, plan.tasks[index], examples, model, transport) for _ in range(2)]
            seconds[index] = max(seconds[index], min(runs))
    return seconds.tolist()


def share_seconds(plan, task, examples, model, transport):
    """Of one rank's share of a task, forward and backward."""
    micro = make_micro_batch(plan, task, examples, transport)
    begun_s = time.process_time()
    token_loss_sum(model(**micro.inputs).logits, micro.labels).backward()
    seconds = time.process_time() - begun_s
    model.zero_grad()
    return seconds


def fitted(plans, seconds, base):
    """A cost model of the tasks that ran."""
    rows = []
    for plan, times in zip(plans, seconds, strict=True):
        for task, task_s in zip(plan.tasks, times, strict=True):
            load = Load.of_pack(plan.pack(task), plan.whole_below_tokens)
            rows.append(Measurement(load, task.degree, task_s))
    return fit_cost(rows, base)


def replay(name, lengths, ranks, tokens, steps, measured):
    """The page of one list; planned with costs measured here, or with those of the preset."""
    cluster = flexcp.Cluster(ranks, tokens)
    data, model, transport = RandomTokens(lengths), small_model(), Alone()
    cost = replace(small_cost(), intra=FREE, inter=FREE)

    def plan(step, policy, mode):
        indices = batch_indices(len(data), SAMPLES * ranks, SEED, step).tolist()
        samples = [Sample(index, int(data.lengths[index])) for index in indices]
        return make_plan(samples, cluster, cost, policy=policy, mode=mode)

    step_s = {(mode, policy): [] for mode in MODES for policy in POLICIES}
    planned_s = dict.fromkeys(step_s, 0.0)
    with flexcp.transformers.enable(model):
        first = [plan(0, policy, mode) for mode in MODES for policy in POLICIES]
        task_seconds(first[0], data, model, transport)  # warms up
        origin = "Planned with the costs of the preset `cpu`."
        if measured:
            fit = fitted(first, [task_seconds(p, data, model, transport) for p in first], cost)
            cost = fit.cost
            origin = f"Fitted costs are off by {fit.error_mean:.1%} a task on average (cross-validated)."
        for step in range(1, steps + 1):
            for mode, policy in step_s:
                made = plan(step, policy, mode)
                times = run_tasks(made, task_seconds(made, data, model, transport))
                step_s[mode, policy].append(float(times.end_s.max()))
                planned_s[mode, policy] += made.step_s
            print(f"{name}: step {step} of {steps}", flush=True)
    rows = []
    for (mode, policy), seconds in step_s.items():
        ours = step_s[mode, "flexcp"]
        rows.append(
            [
                mode,
                policy,
                f"{np.mean(seconds):.3f}",
                "" if policy == "flexcp" else paired(seconds, ours),
                "" if policy == "flexcp" else f"{planned_s[mode, policy] / planned_s[mode, 'flexcp']:.3f}",
                f"{sum(seconds) / planned_s[mode, policy] - 1:+.1%}",
            ]
        )
    columns = ["mode", "policy", "replayed step s", "policy / flexcp", "planned", "replayed / planned"]
    return [
        f"## {name}: {ranks} ranks, {tokens} tokens a rank, {SAMPLES * ranks} samples a step, {steps} steps",
        "",
        origin,
        "",
        *table(columns, rows),
        "",
    ]


def main():
    """Replay all lists and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lists", nargs="*")
    parser.add_argument("--short", action="store_true", help="two ranks, one step: does it run?")
    parser.add_argument("--out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    load, page = os.getloadavg()[0], []
    ranks, scale, tokens, steps = (2, 64, 128, 1) if given.short else (RANKS, SCALE, TOKENS, 4)
    for name, lengths in lists(given.lists).items():
        scaled = np.maximum(1, lengths // scale)
        fitting = scaled[scaled <= ranks * tokens]
        page += replay(f"{name}, lengths over {scale}", fitting, ranks, tokens, steps, not given.short)
    notes = [
        "Processor time of real tasks of a small Qwen3 (the faster of two runs), one rank at a time, through",
        "the dependencies of the plans. Messages cost nothing here, which favours wide rings, so `static`.",
        "`policy / flexcp`: ratio of the sums (least and largest step); `planned`: the same by the plans.",
        "Why tasks take longer than planned: on CPUs torch skips masked keys by blocks of 512, so a causal",
        "call over 512 rows takes as long as a full one, where the formula counts attended pairs. Shards of",
        "400 to 700 rows take up to 18 % longer than it says, and `flexcp` makes most of these.",
        "",
    ]
    write("replay", [*head("Replayed tasks", SEED, load), *notes, *page], given.out)


if __name__ == "__main__":
    main()
