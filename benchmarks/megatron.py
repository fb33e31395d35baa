"""Beside Megatron-Core's dynamic context parallelism: its scheduler and our planner on the same batches.

    python benchmarks/megatron.py [LENGTHS[:COLUMN] ...] [--short] [--out PAGE]

Reads the lists named and that in tests/data, and writes benchmarks/results/megatron.md. The scheduler is the
`BalancedCPScheduler` of the megatron-core that is installed; nothing of it is changed. Both are judged by
FlexCP's cost model, each as it runs: the original passes the model once for every sample and lets all ranks
wait between its waves; FlexCP packs, in waves (lockstep) or without waiting (free-running). Times are CPU
time, the least of several runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from common import PYTHON_LIST, ROOT, head
from planner import COST, SEED, batch, timed

from flexcp.core.layout import default_whole_below_tokens
from flexcp.core.lengths import read_lengths
from flexcp.planner import lower_bound_s
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import placed_s

SIZES = ((32, 8192), (64, 4096), (64, 8192), (64, 16384), (128, 8192), (256, 8192))
BALANCED = """
import json, sys, time, types
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
answers = []
for lengths, ranks, most in json.load(sys.stdin):
    group = types.SimpleNamespace(size=lambda: ranks)
    best, waves = 1e9, str()
    for _ in range(5):
        pairs = list(enumerate(lengths))
        start = time.process_time()
        try:
            _, waves = BalancedCPScheduler(most, group).get_groups_and_subsamples(pairs, None)
        except Exception as error:
            waves = type(error).__name__ + ": " + str(error)
        best = min(best, time.process_time() - start)
    answers.append([best, waves])
print(json.dumps(answers))
"""


ABOUT = """\
Qwen3-8B on the H100 preset, 8 ranks a node, global batch 512, from 128 ranks on 8 a rank. Steps are
predicted by FlexCP's cost model and stand over the bound of a free-running step, which no plan of any kind
can beat. Of the original, every sample is a pass of its own, and all ranks meet between waves; degrees,
groups, order and waves are its own. Its column *packed* is the policy `megatron-dynamic`: the same groups and
waves, samples that share a group packed, no barriers. In favour of the original, its groups are taken to
exist, and its ring to cost what FlexCP's costs.

| list | ranks | tokens a rank | its plan ms | its step / bound | packed | our plan ms | lockstep | free |
|---|---|---|---|---|---|---|---|---|""".splitlines()


def main() -> None:
    """Run everything and write the page."""
    arguments = sys.argv[1:]
    short = "--short" in arguments
    out = ROOT / "benchmarks/results/megatron.md"
    if "--out" in arguments:
        out = Path(arguments[arguments.index("--out") + 1])
    named = [word for word in arguments if not word.startswith("--") and Path(word) != out]
    lists = {}
    for file in [*named, str(PYTHON_LIST)]:
        path, _, column = file.partition(":")
        lists.setdefault(Path(path).stem, read_lengths(path, column or None))
    load = os.getloadavg()[0]
    instances = [
        (name, *batch(lengths, ranks, tokens))
        for name, lengths in lists.items()
        for ranks, tokens in (SIZES[2:3] if short else SIZES)
    ]
    rows = []
    for instance, answer in zip(instances, ask_the_original(instances), strict=True):
        rows.append(row(*instance, *answer))
        print(rows[-1], flush=True)
    page = [
        *head("Beside Megatron-Core's dynamic context parallelism", SEED, load),
        f"megatron-core {version('megatron-core')}, its `BalancedCPScheduler` unchanged.",
        "",
        *ABOUT,
        *rows,
    ]
    out.parent.mkdir(exist_ok=True)
    out.write_text("\n".join(page) + "\n", encoding="utf-8")


def ask_the_original(instances):
    """CPU seconds of its planning, and its waves; in place of them what it raised."""
    given = [
        [[sample.tokens for sample in samples], cluster.ranks, cluster.tokens_per_rank]
        for _, samples, cluster in instances
    ]
    ran = subprocess.run(
        [sys.executable, "-c", BALANCED],
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def row(name, samples, cluster, best_s, waves):
    """One instance."""
    free, ms = timed(samples, cluster, "free-running", runs=5)
    lockstep, _ = timed(samples, cluster, "lockstep")
    packed, _ = timed(samples, cluster, "free-running", "megatron-dynamic")
    whole = default_whole_below_tokens(cluster.tokens_per_rank)
    bound_s = lower_bound_s(Problem.of(samples, cluster, COST, "free-running", whole))
    problem = Problem.of(samples, cluster, COST, "lockstep", whole)
    gap = waves if isinstance(waves, str) else f"{step_s(problem, waves) / bound_s:.3f}"
    gaps = [f"{plan.step_s / bound_s:.3f}" for plan in (packed, lockstep, free)]
    cells = [name, cluster.ranks, cluster.tokens_per_rank, f"{1000 * best_s:.1f}", gap]
    cells += [gaps[0], f"{ms:.1f}", *gaps[1:]]
    return "| " + " | ".join(map(str, cells)) + " |"


def step_s(problem, waves):
    """Seconds of the original's waves: for each the samples of every rank, in the order they run."""
    position = {original: place for place, original in enumerate(problem.order)}
    total_s = 0.0
    for wave in waves:
        groups = defaultdict(list)
        for rank, ids in enumerate(wave):
            for sample in ids:
                groups[sample].append(rank)
        packs = [[position[sample]] for sample in groups]
        seconds = placed_s(problem, packs, [tuple(ranks) for ranks in groups.values()])
        busy_s = defaultdict(float)
        for ranks, time_s in zip(groups.values(), seconds, strict=True):
            for rank in ranks:
                busy_s[rank] += time_s
        total_s += max(busy_s.values())
    return total_s


if __name__ == "__main__":
    main()
