"""Plans on lists of lengths: distance from the bound, planning time, and what integer degrees buy.

    python benchmarks/planner.py [LENGTHS[:COLUMN] ...] [--short] [--out PAGE]

Reads the lists named and those in tests/data, and writes benchmarks/results/planner.md. Planning times are
CPU time, the least of several runs.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from itertools import product
from pathlib import Path

import numpy as np
from common import PYTHON_LIST

import flexcp
from flexcp.core.cluster import Cluster
from flexcp.core.errors import FlexCPError
from flexcp.core.lengths import read_lengths
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import samples_from_lengths
from flexcp.cost import cost_model, hardware
from flexcp.planner import make_plan
from flexcp.planner.bounds import lower_bound_s
from flexcp.planner.degrees import Ladder
from flexcp.planner.policies.flexcp import list_schedules
from flexcp.planner.problem import Problem

ROOT = Path(__file__).parents[1]
SEED = 0
COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
RANKS, TOKENS = (8, 24, 32, 48, 64, 100, 128, 1024), (4096, 8192, 16384)
OTHERS = ("static", "paper", "megatron-dynamic")
SCALES = ((512, 64), (30_720, 1_024), (131_072, 16_384))


def main() -> None:
    """Run everything and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lists", nargs="*")
    parser.add_argument("--short", action="store_true", help="one list, the least sizes: does it run?")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/planner.md")
    given = parser.parse_args()
    shipped = [str(PYTHON_LIST)] if given.short else map(str, sorted((ROOT / "tests/data").glob("*.json")))
    lists = {}
    for file in [*given.lists, *shipped]:
        path, _, column = file.partition(":")
        lists.setdefault(Path(path).stem, read_lengths(path, column or None))
    sizes, tokens, ranks = (SCALES[:1], TOKENS[2:], RANKS[1:3]) if given.short else (SCALES, TOKENS, RANKS)
    page = [
        *header(lists, " --short" if given.short else ""),
        *scale(lists, sizes),
        *integer_degrees(lists, product(tokens, (32, 64, 128))),
        *instances(lists, list(product(tokens, ranks))),
    ]
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text("\n".join(page) + "\n", encoding="utf-8")


def header(lists, form):
    """What this was run with."""
    return [
        "# Planning: distance from the bound, time, integer degrees",
        "",
        f"`python benchmarks/planner.py{form}`, seed {SEED};",
        f"flexcp {flexcp.__version__}, numpy {np.__version__},",
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores. Qwen3-8B on the",
        "H100 preset, 8 ranks a node. Global batch 512, at 128 ranks 1024, at 1024 ranks 8192;",
        "lengths above ranks × tokens are left out. Times are CPU time of `make_plan`; those by",
        "size are the least of several runs.",
        "",
        "Lists: " + ", ".join(f"{name} ({len(lengths):,})" for name, lengths in lists.items()) + ".",
    ]


def batch(lengths, ranks, tokens, size=None):
    """Samples and cluster of one instance; with `size`, drawn with replacement."""
    lengths = lengths[lengths <= ranks * tokens].tolist()
    draw = random.Random(SEED)
    if size is None:
        size = 512 if ranks < 128 else 8 * ranks
        drawn = draw.sample(lengths, size) if size <= len(lengths) else draw.choices(lengths, k=size)
    else:
        drawn = draw.choices(lengths, k=size)
    return samples_from_lengths(drawn), Cluster(ranks, tokens)


def timed(samples, cluster, mode, policy="flexcp", runs=1):
    """A plan, and the CPU milliseconds it took."""
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        plan = make_plan(samples, cluster, COST, mode=mode, policy=policy)
        best = min(best, time.process_time() - start)
    return plan, 1000 * best


def scale(lists, sizes):
    """Planning time by size."""
    rows = ["", "## Planning time, free-running, 8192 tokens a rank", ""]
    rows += ["| list | samples × ranks | plan ms | step / bound |", "|---|---|---|---|"]
    for name, lengths in lists.items():
        if lengths.max() < 20_000:
            continue  # 1,024 ranks are not bought for such lengths
        for size, ranks in sizes:
            samples, cluster = batch(lengths, ranks, 8192, size)
            plan, ms = timed(samples, cluster, "free-running", runs=9 if size < 1000 else 2)
            rows.append(f"| {name} | {size:,} × {ranks:,} | {ms:.1f} | {plan.gap:.4f} |")
    return rows


def instances(lists, grid):
    """Step over bound of flexcp and others; at 1,024 ranks of flexcp alone."""
    rows, gaps, beaten = [], {}, []
    for mode in ("free-running", "lockstep"):
        rows += ["", f"## Step / bound, {mode}", ""]
        rows += ["| list | tokens per rank | ranks | " + " | ".join(OTHERS) + " | flexcp | plan ms |"]
        rows += ["|---|---|---|---|---|---|---|---|"]
        for name, lengths in lists.items():
            for tokens, ranks in grid:
                samples, cluster = batch(lengths, ranks, tokens)
                plan, ms = timed(samples, cluster, mode)
                gaps.setdefault(mode, []).append((plan.gap, 32 <= ranks <= 128))
                others = [gap_of(samples, cluster, mode, x) if ranks < 1024 else None for x in OTHERS]
                beaten += [plan.gap / gap for gap in others if gap]
                shown = [f"{gap:.3f}" if gap else "–" for gap in others]
                cells = [name, tokens, ranks, *shown, f"{plan.gap:.3f}", f"{ms:.0f}"]
                rows.append("| " + " | ".join(map(str, cells)) + " |")
                print(rows[-1], flush=True)
    summary = [
        "",
        "## Summary of step / bound",
        "",
        "| mode | instances | mean | worst |",
        "|---|---|---|---|",
    ]
    for mode, found in gaps.items():
        for what, chosen in (("all", found), ("32 to 128 ranks", [x for x in found if x[1]])):
            values = [gap for gap, _ in chosen]
            mean = statistics.mean(values)
            summary.append(f"| {mode}, {what} | {len(values)} | {mean:.3f} | {max(values):.3f} |")
    slower = sum(ratio > 1 for ratio in beaten)
    summary += [
        "",
        f"Beside {len(beaten)} plans of others in these tables flexcp is slower in {slower};",
        f"its step takes {statistics.mean(beaten):.3f} of theirs on average, {max(beaten):.3f} at most.",
        "A dash: the policy cannot serve the instance, or was not asked.",
    ]
    return summary + rows


def gap_of(samples, cluster, mode, policy):
    """Step over bound of a policy; None where it cannot serve the instance."""
    try:
        return timed(samples, cluster, mode, policy)[0].gap
    except FlexCPError:
        return None


def integer_degrees(lists, grid):
    """Flexcp as it is, and kept to powers of two."""
    rows = [
        "",
        "## What integer degrees alone buy: list schedules with any degree and with powers of two",
        "",
    ]
    rows += [
        "| list | tokens per rank | ranks | any, s | powers of two, s | slower by |",
        "|---|---|---|---|---|---|",
    ]
    free = Ladder.degrees

    def powers(self, limits_s):
        degrees = free(self, limits_s)
        up = 2 ** np.ceil(np.log2(degrees)).astype(np.int64)
        return np.where(up <= self.ranks, up, 2 ** int(np.log2(self.ranks)))

    for (name, lengths), (tokens, ranks) in product(lists.items(), grid):
        samples, cluster = batch(lengths, ranks, tokens)
        any_s = own_step_s(samples, cluster)
        Ladder.degrees = powers
        try:
            two_s = own_step_s(samples, cluster)
        finally:
            Ladder.degrees = free
        rows.append(f"| {name} | {tokens} | {ranks} | {any_s:.3f} | {two_s:.3f} | {two_s / any_s - 1:.1%} |")
    return rows


def own_step_s(samples, cluster):
    """Step of the list schedules alone, without other policies."""
    problem = Problem.of(samples, cluster, COST, "free-running", 512)
    return list_schedules(problem, lower_bound_s(problem)).step_s


if __name__ == "__main__":
    main()
