"""Tables and drawings of plans: right numbers, readable without colour, well-formed SVG."""

import io
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import samples_from_lengths
from flexcp.cost.model import CostModel, Link
from flexcp.planner import make_plan
from flexcp.planner.bounds import lower_bound
from flexcp.planner.outcome import Outcome, communication_share, outcome_of
from flexcp.planner.problem import Problem
from flexcp.report.explain import explain
from flexcp.report.svg import plan_svg
from flexcp.report.tables import choice_table, format_ranks, policy_table
from flexcp.report.timeline import plan_timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plan() -> Plan:
    """Five ranks, two waves: degree 3 beside two of 1, then degree 4 with a rank left idle."""
    tasks = (
        Task((0,), (0, 1, 2), 0, 0.0, 2.0),
        Task((1,), (3,), 0, 0.0, 2.0),
        Task((2,), (4,), 0, 0.0, 1.0),
        Task((3, 4), (0, 1, 3, 4), 1, 2.0, 4.0),
    )
    samples = samples_from_lengths([3000, 900, 500, 1500, 1200])
    return Plan("flexcp", "lockstep", Cluster(5, 1024, ranks_per_node=4), 512, samples, tasks, bound_s=3.2)


def rendered(renderable: object, *, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_plain_timeline_shows_degrees_and_idle_time(plan):
    """Without colour each cell is the degree of the task; idle time is a dot."""
    lines = plan_timeline(plan, width=19, colour=False).plain.splitlines()

    assert lines[0] == "0 3333333344444444"
    assert lines[2] == "2 33333333········"
    assert lines[4] == "4 1111····44444444"
    assert re.fullmatch(r" +0 +2\.00 s *4\.00 s", lines[5])


def test_colour_timeline_has_two_ranks_a_row(plan):
    """Half blocks: five ranks are three rows, and every cell carries a colour."""
    text = plan_timeline(plan, width=19, colour=True)
    rows = [line for line in text.plain.splitlines() if "▀" in line]

    assert [row.split()[0] for row in rows] == ["0", "2", "4"]
    assert len(text.spans) >= 3 * 16


def test_timeline_thins_out_ranks_beyond_its_rows(plan):
    """A thousand ranks still fit on a screen."""
    wide = Plan("flexcp", "lockstep", Cluster(1024, 1024), 512, plan.samples, plan.tasks, 3.2)

    assert len(plan_timeline(wide, rows=16, colour=False).plain.splitlines()) == 16 + 2


def test_svg_is_well_formed_and_complete(plan):
    """One box per task and run of neighbouring ranks, each with a tooltip; dark mode by media query."""
    root = ElementTree.fromstring(plan_svg(plan))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class", "").startswith("task")]

    assert len(boxes) == 5  # ranks 0, 1 and 3, 4 of the last task are two boxes
    assert all(box.find(f"{SVG}title") is not None for box in boxes)
    assert "degree 4: ranks 0–1, 3–4" in boxes[-1].find(f"{SVG}title").text
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text
    assert not re.search(r"(href|src|url)\s*[=(]", plan_svg(plan))


def test_svg_boxes_stay_inside_the_page(plan):
    """No box leaves the drawing area."""
    root = ElementTree.fromstring(plan_svg(plan))
    width = float(root.get("viewBox").split()[2])

    for box in root.iter(f"{SVG}rect"):
        if box.get("class", "").startswith("task"):
            assert 0 < float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) < width


def test_policy_table_keeps_policies_that_cannot_serve(plan):
    """A refusal is a row with its reason, never a missing row."""
    slow = outcome_of("static", [plan], [COST], plan_ms=3.0)
    refusing = Outcome("ulysses", refusal="needs degree 37, heads allow 8")
    text = rendered(policy_table([slow, refusing], slow))

    assert "needs degree 37, heads allow 8" in text
    assert "1–4" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "1.250" in text  # the gap, 4 / 3.2
    assert "1.00×" in text


def test_a_long_refusal_stays_in_its_row(plan):
    """Reasons wrap beside the name, inside the terminal."""
    refusing = Outcome("megatron-dynamic", refusal="needs a great many ranks, " * 6)
    lines = rendered(
        policy_table([refusing, outcome_of("flexcp", [plan], [COST])], None), width=80
    ).splitlines()

    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("megatron-dynamic  needs a great")
    assert lines[3].startswith(" " * 18)
    assert lines[-1].startswith("flexcp")


COST = CostModel(1e-6, 1e-4, 0.0, 0.01, 0.0, 1000.0, 1, Link(1e6, 0.0), Link(1e5, 0.0))


def planned(lengths: list[int], ranks: int, mode: str = "lockstep") -> tuple[Plan, Problem]:
    samples, cluster = samples_from_lengths(lengths), Cluster(ranks, 1024, ranks_per_node=4)
    made = make_plan(samples, cluster, COST, policy="paper", mode=mode)
    return made, Problem.of(samples, cluster, COST, mode, 512)


def test_communication_share_counts_what_nothing_hides():
    """By hand: two ranks send 1000 bytes a token of half a sample in a ring whose attention is shorter."""
    samples = samples_from_lengths([1000])
    task = Task((0,), (0, 1), 0, 0.0, 0.0)
    attention_s, message_s = 1e-6 * 500_500 / 2, 1000.0 * 500 / 1e6
    seconds = message_s + 1e-4 * 500 + 0.01
    made = Plan("flexcp", "lockstep", Cluster(2, 1024), 512, samples, (replace(task, end_s=seconds),), 0.1)

    assert communication_share(made, COST) == pytest.approx((message_s - attention_s) / seconds)
    assert communication_share(made, replace(COST, intra=Link(1e9, 0.0))) == pytest.approx(0.0)


def test_the_tight_bound_is_named():
    """One giant is limited by itself, many small ones by their work, full waves by memory."""

    def reason(lengths, mode="lockstep"):
        return lower_bound(planned(lengths, 4, mode=mode)[1]).reason

    assert "the longest sample, 3,000 tokens, on its best" in reason([3000])
    assert reason([200] * 20) == "the work of all samples on all ranks"
    assert reason([1024, 1024, 1024, 1024, 300]) == "the waves that memory forces"
    assert "no room for beside it" in reason([2900, *[700] * 8])
    assert "one at a time" in reason([3000, 2900, 2800], "free-running")


def test_reasons_of_degrees():
    """Memory's least, and wider than that where a narrower group would end late."""
    tight = explain(planned([3000, 100], 4)[0], COST)[0]
    free = explain(planned([1000, 100, 100], 4)[0], replace(COST, intra=Link(1e9, 0.0)))

    assert (tight.sample, tight.tokens) == (0, 3000)
    assert tight.less_s is None or tight.less_s > 0
    assert tight.reason in {"memory allows no less", "less outlasts the step", "more is no faster"}
    assert all(choice.degree > 1 for choice in free)
    text = rendered(choice_table([tight]), width=80)
    assert "3,000" in text
    assert tight.reason in text
    assert max(map(len, text.splitlines())) <= 80


def test_outcome_averages_over_steps(plan):
    """Two equal steps look like one."""
    once, twice = outcome_of("flexcp", [plan], [COST]), outcome_of("flexcp", [plan] * 2, [COST] * 2)

    assert twice.step_s == once.step_s == 4.0
    assert twice.idle_share == pytest.approx(once.idle_share) == pytest.approx(plan.idle_share)
    assert twice.waves == 2
    assert twice.degrees == {1: 4, 3: 2, 4: 2}


def test_ranks_in_ring_order_are_shown_as_a_set():
    """The ring may run across nodes in any order; people look for which ranks."""
    assert format_ranks((9, 4, 3, 2)) == "2–4, 9"
