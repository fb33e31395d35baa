"""The demo's run beside its simulation: per-step times from measured costs and the plans that really ran.

    make demo
    flexcp profile --nproc 4 --config examples/demo.toml --longest 8192 --out runs/demo.calibration.json
    python benchmarks/simulated_demo.py [--run runs/demo] [--calibration FILE] [--out PAGE]

Ranks of the demo share the cores of one machine, so costs are core-seconds (the clock of a calibration on
CPUs), and in the simulator running tasks share the cores: a rank that waits leaves its part to the others.
Plans are read back from the traces. Writes benchmarks/results/simulated_demo.md: a row a step, for the
calibration of `flexcp profile` if there is one, and for costs fitted to the tasks of every other step of the
run itself, which predict the steps in between.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import flexcp
from flexcp.core.plan import Plan, Task
from flexcp.core.run_folder import read_info, read_reports, trace_path
from flexcp.core.trace import pack_of, read_spans
from flexcp.cost import CostModel, Link
from flexcp.cost.calibration import read_calibration
from flexcp.cost.fit import fit_cost
from flexcp.cost.measurements import Measurement
from flexcp.cost.model import Load
from flexcp.simulate import Conditions, simulate

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0))
GOAL = 0.08


def main() -> None:
    """Simulate, compare, write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, default=ROOT / "runs/demo")
    parser.add_argument("--calibration", type=Path, default=ROOT / "runs/demo.calibration.json")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/simulated_demo.md")
    given = parser.parse_args()
    info, reports = read_info(given.run), list(read_reports(given.run))
    spans = task_spans(given.run, info.cluster.ranks)
    plans = [plan_of(spans[report.step], info, report) for report in reports]
    base, notes, columns = cost_of(info), [], {}
    if given.calibration.exists():
        calibration = read_calibration(given.calibration)
        columns["profile"] = simulated_s(plans, calibration.cost), range(len(plans))
        notes.append(
            f"- profile: `flexcp profile`, {calibration.measurements} tasks in {calibration.setup.clock} "
            f"time; a task is off by {calibration.error_mean:.1%} on average (cross-validated)."
        )
    for name, first in (("in-run, even", 0), ("in-run, odd", 1)):
        known = range(first, len(plans), 2)
        rows = [row for step in known for row in measurements(plans[step], spans[reports[step].step])]
        found = fit_cost(rows, base)
        columns[name] = simulated_s(plans, found.cost), range(1 - first, len(plans), 2)
        notes.append(
            f"- {name}: fitted to the {len(rows)} tasks of those steps, a task is off by "
            f"{found.error_mean:.1%} (cross-validated); the other steps count."
        )
    notes.append(f"- plan: what the trainer predicted with `{info.hardware}`, at an even share of the cores.")
    columns["plan"] = [report.predicted_s for report in reports], range(len(plans))
    page = [*header(info), *notes, "", *summary(reports, columns), "", *table(reports, columns)]
    given.out.write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page))


def cost_of(info):
    """The cost model of the run: links, bytes and layers for a fit."""
    links = {name: Link(**info.coefficients[name]) for name in ("intra", "inter")}
    return CostModel(**{**info.coefficients, **links})


def task_spans(folder, ranks):
    """Spans of tasks by step, of all ranks."""
    by_step = defaultdict(list)
    for rank in range(ranks):
        for span in read_spans(trace_path(folder, 0, rank)):
            if span.name == "task":
                by_step[span.step].append(span)
    return by_step


def plan_of(spans, info, report):
    """The plan of a step, from what its tasks say of themselves; in an order that every rank followed."""
    members = defaultdict(list)
    for span in spans:
        members[tuple(span.detail["samples"])].append(span)
    samples, tasks = [], []
    for group in sorted(members.values(), key=lambda group: group[0].detail["predicted_start_s"]):
        told = group[0].detail
        assert len(group) == told["degree"]
        first = len(samples)
        samples += pack_of(told)
        start_s = told["predicted_start_s"]
        positions = tuple(range(first, len(samples)))
        ranks = tuple(sorted(span.rank for span in group))
        tasks.append(Task(positions, ranks, 0, start_s, start_s + told["predicted_s"]))
    plan = Plan(
        *(info.policy, info.mode, info.cluster, info.whole_below_tokens),
        *(tuple(samples), tuple(tasks), report.bound_s),
    )
    assert plan.degrees == report.degrees
    assert abs(plan.step_s / report.predicted_s - 1) < 1e-9
    assert sum(sample.tokens for sample in samples) == report.tokens
    return plan


def simulated_s(plans, cost):
    """Makespan of every step, ranks sharing the cores."""
    return [step.report.measured_s for step in simulate(plans, cost, Conditions(cores=CORES))]


def measurements(plan, spans):
    """Tasks of a step in core-seconds: a member has its share of the cores for as long as it runs."""
    shares = []
    for start_s, end_s in pairwise(sorted({t for span in spans for t in (span.start_s, span.end_s)})):
        busy = sum(span.start_s <= start_s and end_s <= span.end_s for span in spans)
        shares.append((start_s, end_s, min(1.0, CORES / max(1, busy))))
    core_s = defaultdict(list)
    for span in spans:
        inside = [(b - a) * share for a, b, share in shares if span.start_s <= a and b <= span.end_s]
        core_s[tuple(span.detail["samples"])].append(sum(inside))
    for task in plan.tasks:
        pack = plan.pack(task)
        load = Load.of_pack(pack, plan.whole_below_tokens)
        found = core_s[tuple(sample.id for sample in pack)]
        yield Measurement(load, task.degree, statistics.mean(found))


def header(info):
    """What this was run with."""
    return [
        "# The demo beside its simulation",
        "",
        "`python benchmarks/simulated_demo.py`; times of the slowest rank from its first task to the end of",
        f"its last. {info.cluster.ranks} ranks on {CORES} cores, {platform.machine()};",
        f"flexcp {flexcp.__version__}.",
        "",
    ]


def summary(reports, columns):
    """Agreement over the steps that count."""
    rows = ["| costs from | steps | mean error | mean of absolute errors | worst | within 8 % |"]
    rows.append("|---|---|---|---|---|---|")
    for name, (seconds, counted) in columns.items():
        errors = [seconds[step] / reports[step].measured_s - 1 for step in counted]
        absolute = [abs(error) for error in errors]
        rows.append(
            f"| {name} | {len(errors)} | {statistics.mean(errors):+.1%} | {statistics.mean(absolute):.1%} "
            f"| {max(absolute):.1%} | {sum(error <= GOAL for error in absolute)} |"
        )
    return rows


def table(reports, columns):
    """A row a step; in brackets what was fitted on this very step."""
    rows = ["| step | measured s | " + " | ".join(columns) + " |", "|---|---" + "|---" * len(columns) + "|"]
    for step, report in enumerate(reports):
        cells = [str(report.step), f"{report.measured_s:.2f}"]
        for seconds, counted in columns.values():
            cell = f"{seconds[step]:.2f} ({seconds[step] / report.measured_s - 1:+.1%})"
            cells.append(cell if step in counted else f"[{cell}]")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


if __name__ == "__main__":
    main()
