"""The example worked by hand in docs/simulator.md is what the simulator computes."""

import re
from pathlib import Path

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost import CostModel, Link
from flexcp.simulate import Conditions, simulate

PAGE = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text(encoding="utf-8")


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
