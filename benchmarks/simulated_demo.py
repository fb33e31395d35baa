"""The demo's run beside its simulation: per-step times from a calibration and the plans that really ran.

    make demo
    flexcp profile --nproc 4 --config examples/demo.toml --out runs/demo.calibration.json
    python benchmarks/simulated_demo.py [--run runs/demo] [--calibration runs/demo.calibration.json]

Ranks of the demo share the cores of one machine, so the calibration counts core-seconds (its clock is `cpu`)
and the simulator lets running tasks share the cores: a rank that waits leaves its part to the others. Plans
are read back from the traces. Writes benchmarks/results/simulated_demo.md: a row a step, for the calibration
of `flexcp profile`, and for one fitted to the tasks of every other step of the run itself, which then
predicts the remaining ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import flexcp
from flexcp.core.plan import Plan, Task
from flexcp.core.run_folder import read_info, read_reports, trace_path
from flexcp.core.sample import Sample
from flexcp.core.trace import read_spans
from flexcp.cost.calibration import fit, read_calibration
from flexcp.cost.measurements import Measurement
from flexcp.cost.model import Load
from flexcp.simulate import Conditions, simulate

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0))


def main() -> None:
    """Simulate, compare, write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, default=ROOT / "runs/demo")
    parser.add_argument("--calibration", type=Path, default=ROOT / "runs/demo.calibration.json")
    given = parser.parse_args()
    info, reports = read_info(given.run), list(read_reports(given.run))
    calibration = read_calibration(given.calibration)
    if calibration.setup.clock != "cpu":
        raise SystemExit("the calibration counts wall time: it is not of ranks that share cores")
    spans = task_spans(given.run, info.cluster.ranks)
    plans = [plan_of(spans[report.step], info, report) for report in reports]
    fitted_on = {report.step for report in reports[::2]}
    rows = [row for step in fitted_on for row in measurements(plans[step], spans[step])]
    own = fit(rows, replace(calibration.setup, memory_bytes_per_token=None))
    profiled_s = simulated_s(plans, calibration.cost)
    own_s = simulated_s(plans, own.cost)
    page = [*header(info, calibration, own), *table(reports, profiled_s, own_s, fitted_on)]
    target = ROOT / "benchmarks/results/simulated_demo.md"
    target.write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page))


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
        samples += [Sample(i, n) for i, n in zip(told["samples"], told["tokens"], strict=True)]
        start_s = told["predicted_start_s"]
        positions = tuple(range(first, len(samples)))
        ranks = tuple(sorted(span.rank for span in group))
        tasks.append(Task(positions, ranks, 0, start_s, start_s + told["predicted_s"]))
    plan = Plan(
        *(info.policy, info.mode, info.cluster, info.whole_below_tokens),
        *(tuple(samples), tuple(tasks), report.bound_s),
    )
    assert plan.degrees == report.degrees
    assert sum(sample.tokens for sample in samples) == report.tokens
    return plan


def simulated_s(plans, cost):
    """Makespan of every step, ranks sharing the cores."""
    return [step.report.measured_s for step in simulate(plans, cost, Conditions(cores=CORES))]


def measurements(plan, spans):
    """Tasks of a step in core-seconds: a member has its share of the cores for as long as it runs."""
    times = sorted({t for span in spans for t in (span.start_s, span.end_s)})
    shares = []
    for start_s, end_s in pairwise(times):
        busy = sum(span.start_s <= start_s and end_s <= span.end_s for span in spans)
        shares.append((start_s, end_s, min(1.0, CORES / max(1, busy))))
    core_s = defaultdict(list)
    for span in spans:
        inside = [(b - a) * share for a, b, share in shares if span.start_s <= a and b <= span.end_s]
        core_s[tuple(span.detail["samples"])].append(sum(inside))
    for task in plan.tasks:
        pack = plan.pack(task)
        load = sum((Load.of(sample, plan.whole_below_tokens) for sample in pack), Load())
        found = core_s[tuple(sample.id for sample in pack)]
        yield Measurement(load, task.degree, statistics.mean(found))


def header(info, calibration, own):
    """What this was run with, and how well the fits hold."""
    lines = f"""# The demo beside its simulation

`python benchmarks/simulated_demo.py`; flexcp {flexcp.__version__}, {info.cluster.ranks} ranks on
{CORES} cores of {calibration.setup.device}. Seconds of the slowest rank, first task to last.

- profile: `flexcp profile`, {calibration.measurements} tasks, off by {calibration.error_mean:.1%} on average
  (cross-validated).
- in-run: fitted to {own.measurements} tasks of every other step, {own.error_mean:.1%} (cross-validated);
  steps it was fitted on are in brackets and not counted.
- plan: what the trainer predicted with `{info.hardware}`, at an even share of the cores.
"""
    return lines.splitlines()


def table(reports, profiled_s, own_s, fitted_on):
    """A row a step, and the agreement over all of them."""
    rows = ["| step | measured | profile | | in-run | | plan | |", "|---|---|---|---|---|---|---|---|"]
    errors = defaultdict(list)
    for report, profiled, own in zip(reports, profiled_s, own_s, strict=True):
        cells = [str(report.step), f"{report.measured_s:.2f}"]
        known = report.step in fitted_on
        for name, seconds in (("profile", profiled), ("in-run", own), ("plan", report.predicted_s)):
            error = seconds / report.measured_s - 1
            hidden = name == "in-run" and known
            if not hidden:
                errors[name].append(error)
            cells += [f"{seconds:.2f}", f"({error:+.1%})" if hidden else f"{error:+.1%}"]
        rows.append("| " + " | ".join(cells) + " |")
    rows += ["", "| | steps | mean error | mean of absolute errors | worst | within 8 % |"]
    rows += ["|---|---|---|---|---|---|"]
    for name, found in errors.items():
        absolute = [abs(error) for error in found]
        within = sum(error <= 0.08 for error in absolute)
        rows.append(
            f"| {name} | {len(found)} | {statistics.mean(found):+.1%} | {statistics.mean(absolute):.1%} "
            f"| {max(absolute):.1%} | {within} of {len(found)} |"
        )
    return rows


if __name__ == "__main__":
    main()
