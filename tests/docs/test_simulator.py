"""The example worked by hand in docs/simulator.md is what the simulator computes."""

import re
from pathlib import Path

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost import CostModel, Link
from flexcp.simulate import Conditions, simulate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")


def result_rows(name: str) -> list[list[str]]:
    """Cells of all table rows of a page of benchmarks/results."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in lines]


def test_how_close_it_is_is_what_was_measured():
    """Errors of the demo's simulation, as its page has them."""
    summary = {cells[0]: cells[1:] for cells in result_rows("simulated_demo") if len(cells) == 6}
    steps, _, mean, worst, within = summary["profile"]
    even, odd, plan = summary["in-run, even"], summary["in-run, odd"], summary["plan"]

    def spaced(share):
        return share.replace("%", " %")

    assert f"is off by {spaced(mean)} on average and {spaced(worst)} at most; {within} of {steps}" in PAGE
    assert f"off by {spaced(even[2])} (fitted to even steps) and {spaced(odd[2])} (odd)" in PAGE
    assert ("all of them within 8 %" in PAGE) == all(row[4] == row[0] for row in (even, odd))
    assert f"on the way, was off by {spaced(plan[2])}" in PAGE


def test_how_fast_is_what_was_measured():
    """Processor time of the least and of the largest step, as their page has them."""
    ms = {
        (c[0], c[1], c[3][:6]): c[4] for c in result_rows("simulator") if len(c) == 6 and c[1][:1].isdigit()
    }
    small = ms["512", "64", "alone"]
    alone_s, shared_s = (float(ms["131,072", "16,384", day]) / 1e3 for day in ("alone", "jitter"))

    assert f"512 samples on 64 ranks takes {small} ms of processor time" in PAGE
    assert f"131,072 samples on 16,384 ranks {alone_s:.1f} s, or {shared_s:.1f} s where rings share" in PAGE


def test_step_by_hand():
    link = Link(200.0, 0.0)
    cost = CostModel(0.0, 0.02, 0.0, 0.0, 0.0, 4.0, 1, link, link)
    tasks = (Task((0,), (0, 2), 0, 0.0, 2.0), Task((1,), (1, 3), 0, 0.0, 4.0))
    plan = Plan("static", "free-running", Cluster(4, 100, 2), 1, (Sample(0, 100), Sample(1, 200)), tasks, 1.0)
    spans = []
    (step,) = simulate([plan], cost, Conditions(uplinks=1), spans.append)
    rows = [[int(x) for x in re.findall(r"(\d) s", row)] for row in re.findall(r"pack, ranks .*", PAGE)]

    assert rows == [[1, 1, 2, 2, 3], [2, 2, 4, 4, 6]]
    assert [plan.tasks[i].duration_s for i in (0, 1)] == [row[2] for row in rows]
    assert sorted({span.end_s for span in spans}) == [float(x) for x in re.findall(r"\*\*(\d) s\*\*", PAGE)]
    assert step.time.idle_s == pytest.approx(int(re.search(r"(\d) of 20 rank-seconds", PAGE)[1]))
    assert step.time.total_s == pytest.approx(20)
