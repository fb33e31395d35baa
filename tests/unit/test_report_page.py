"""The page of a run or plan: its numbers, its limits, and what is said of files that are damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.run_folders import BATCHES, write_run

from flexcp.cli import main
from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.run_folder import attempt_path, read_info, read_reports, trace_path
from flexcp.core.sample import Sample
from flexcp.core.trace import read_spans
from flexcp.report.page.from_plan import subject_of_plan
from flexcp.report.page.from_run import subject_of_run
from flexcp.report.page.html import page
from flexcp.report.page.spans import latest_spans
from flexcp.report.page.subject import plans_of
from flexcp.report.page.versus import compared
from flexcp.report.tables import format_seconds

LENGTHS = Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json"
SAMPLES = sum(map(len, BATCHES))
HOSTILE = '<script>alert("x")</script>'
VOID = {"meta", "link"}


class Tree(HTMLParser):
    """Elements of a document; fails where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        section = next((e[1].get("id") for e in reversed(self.elements) if e[0] == "section"), None)
        self.elements.append((tag, dict(attrs), section or ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    def count(self, section: str, class_: str) -> int:
        """Elements of a class in a section."""
        return sum(
            class_ in (attributes.get("class") or "").split()
            for _, attributes, where in self.elements
            if where == section
        )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps on 8 ranks, all tasks 1.2 times as long as predicted."""
    write_run(tmp_path / "run", BATCHES, Cluster(8, 2048, 4), slower=1.2)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of real lengths on 16 ranks."""
    out = tmp_path_factory.mktemp("plan") / "plan.json"
    arguments = ["plan", str(LENGTHS), "--model", "qwen3-8b", "--ranks", "16", "--tokens-per-rank", "16384"]
    assert main([*arguments, "--global-batch", "64", "--steps", "2", "--out", str(out), "--json"]) == 0
    return out


def test_a_run_is_read_back_as_it_was_written(run: Path) -> None:
    """Lengths, degrees, memory, timeline and verdict are those of the plans that were run."""
    plans = write_run(run, BATCHES, Cluster(8, 2048, 4), slower=1.2)
    subject = subject_of_run(run)

    assert sum(subject.lengths.samples) == pytest.approx(SAMPLES)
    assert sum(subject.lengths.tokens) == pytest.approx(sum(map(sum, BATCHES)))
    tasks = sum(len(plan.tasks) for plan in plans)
    assert sum(share.tasks for share in subject.degrees) == tasks == len(subject.pairs)
    busy_s = sum(task.degree * task.duration_s for plan in plans for task in plan.tasks)
    assert sum(share.rank_s for share in subject.degrees) == pytest.approx(1.2 * busy_s)
    assert max(subject.memory.peak_tokens) == max(
        plan.layout(task).max_rows for plan in plans for task in plan.tasks
    )
    assert [timeline.step for timeline in subject.timelines] == [0, 1, 2]
    for timeline, plan in zip(subject.timelines, plans, strict=True):
        predicted, measured = timeline.panels
        assert predicted.end_s == pytest.approx(plan.step_s)
        assert measured.end_s == pytest.approx(1.2 * plan.step_s)
        assert sum(len(box.by_rank) for box in measured.boxes) == sum(task.degree for task in plan.tasks)
    assert all(after == pytest.approx(1.2 * before) for before, after, _ in subject.pairs)
    assert "1.20× the predicted (a step is off by 20.0% on average)" in subject.verdict
    assert any("flexcp profile" in advice for advice in subject.advice)


def test_where_the_time_went_is_shown(run: Path) -> None:
    """Parts as a plot, waits for messages beside their task and not as marks, MFU among the facts."""
    metrics, trace = run / "metrics.jsonl", trace_path(run, 0, 0)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps({**record, "mfu": 0.413}) + "\n" for record in records))
    spans = [json.loads(line) for line in trace.read_text().splitlines()]
    task = next(span for span in spans if span["name"] == "task")
    task["detail"]["ring_wait_s"] = 0.0123
    waits = {**task, "name": "ring wait", "detail": None}
    trace.write_text("".join(json.dumps(span) + "\n" for span in [*spans, waits]))
    subject = subject_of_run(run)
    text = page(subject)

    assert sum(subject.parts.values()) == pytest.approx(1.0)
    assert subject.parts["compute"] > 0.5
    assert 'id="parts"' in text
    drawn = text[text.index('id="parts"') :].split("<details")[0]
    for part in subject.parts:  # each bar has its name below, the widest too
        assert re.search(rf"<text [^>]*>{part}</text>", drawn), part
    assert text.count("waited 12.3 ms for messages") == 1
    assert "ring wait, " not in text
    assert ("MFU", "41.3%") in subject.facts


def test_other_policies_are_planned_for_the_samples_of_the_run(run: Path) -> None:
    """The run's own policy is last and is what the run had."""
    subject = subject_of_run(run)
    rows = {row.policy: row for row in subject.policies}

    assert {"static", "paper", "flexcp"} <= set(rows)
    assert list(rows)[-1] == "flexcp"
    steps_s = [timeline.panels[0].end_s for timeline in subject.timelines]
    assert rows["flexcp"].step_s == pytest.approx(sum(steps_s) / 3)
    assert rows["paper"].step_s >= rows["flexcp"].step_s


def planned_again(run: Path) -> tuple[float, float]:
    """Mean seconds of a step by the run's own policy: as the run planned it, and as the page does."""
    subject = subject_of_run(run)
    steps_s = [timeline.panels[0].end_s for timeline in subject.timelines]
    return sum(steps_s) / len(steps_s), subject.policies[-1].step_s


def test_images_are_planned_again_as_they_were(tmp_path: Path) -> None:
    """Spans and the work of a vision encoder are in the traces, so the run's own row is what the run had."""
    images = [Sample(90, 2000, ((100, 1900),)), Sample(91, 900, (), 40_000_000), Sample(92, 800, ((0, 700),))]
    cluster = Cluster(8, 2048, 4)
    write_run(tmp_path / "images", [[*images, *batch] for batch in BATCHES], cluster)
    plain = [Sample(image.id, image.tokens) for image in images]
    write_run(tmp_path / "plain", [[*plain, *batch] for batch in BATCHES], cluster)
    had_s, again_s = planned_again(tmp_path / "images")

    assert again_s == pytest.approx(had_s, rel=1e-9)
    assert had_s > 1.1 * planned_again(tmp_path / "plain")[0]
    pack = {sample for plan in plans_of(subject_of_run(tmp_path / "images"), 0) for sample in plan.samples}
    assert set(images) <= pack


def test_learnt_costs_are_those_of_each_step(tmp_path: Path) -> None:
    """Every step is planned again at the costs that its plan knew, not at those of run.json."""
    factors = [(1.0,) * 4, (3.0, 0.5, 1.0, 2.0), (0.4, 2.0, 1.5, 1.0)]
    write_run(tmp_path / "learnt", BATCHES, Cluster(8, 2048, 4), factors=factors)
    write_run(tmp_path / "plain", BATCHES, Cluster(8, 2048, 4))
    had_s, again_s = planned_again(tmp_path / "learnt")

    assert again_s == pytest.approx(had_s, rel=1e-9)
    assert abs(had_s / planned_again(tmp_path / "plain")[0] - 1) > 0.05


def test_a_run_that_went_on_with_other_ranks_keeps_all_of_them(tmp_path: Path) -> None:
    """Eight ranks, then five of another budget: nothing of the first two steps is lost, and it is said."""
    first = write_run(tmp_path, BATCHES, Cluster(8, 2048, 4))[:2]
    records = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(records[:2]))
    second = write_run(tmp_path, BATCHES[2:], Cluster(5, 4096, 4), first_step=2)
    subject = subject_of_run(tmp_path)
    plans = [*first, *second]

    assert sum(subject.lengths.samples) == pytest.approx(SAMPLES)
    assert sum(share.rank_s for share in subject.degrees) == pytest.approx(
        sum(task.degree * task.duration_s for plan in plans for task in plan.tasks)
    )
    for step, plan in enumerate(plans):
        drawn = plans_of(subject, step)[0]
        assert drawn.cluster == plan.cluster
        assert drawn.step_s == pytest.approx(plan.step_s)
        assert drawn.degrees == plan.degrees
    assert subject.policies[-1].step_s == pytest.approx(sum(plan.step_s for plan in plans) / 3)
    assert (len(subject.memory.ranks), subject.memory.capacity_tokens) == (5, 4096)
    told = "The run went on with other ranks: from step 0, 8 × 2,048 tokens; from step 2, 5 × 4,096 tokens."
    assert told in subject.notices
    assert page(subject).endswith("</html>\n")


def test_steps_of_which_traces_lack_are_no_plans(tmp_path: Path) -> None:
    """A rank of the first attempt is missing: its steps are neither compared nor drawn as plans."""
    write_run(tmp_path, BATCHES, Cluster(8, 2048, 4))
    plans = write_run(tmp_path, BATCHES[2:], Cluster(6, 2048, 4), first_step=2)
    trace_path(tmp_path, 0, 7).unlink()
    subject = subject_of_run(tmp_path)

    assert plans_of(subject, 1) == ()
    assert plans_of(subject, 2)[0].degrees == plans[0].degrees
    assert subject.policies[-1].step_s == pytest.approx(plans[0].step_s)
    notices = " ".join(subject.notices)
    assert "Traces of 1 ranks are missing from step 0 on, the first is 7." in notices
    assert "Policies are compared on 1 of 3 steps" in notices


def test_an_attempt_without_its_run_json_is_named(tmp_path: Path) -> None:
    """Nobody else knows how many ranks it had."""
    write_run(tmp_path, BATCHES, Cluster(8, 2048, 4))
    write_run(tmp_path, BATCHES[2:], Cluster(6, 2048, 4), first_step=2)
    (attempt_path(tmp_path, 0) / "run.json").unlink()

    with pytest.raises(InputError, match=r"from-step-00000000 has no run\.json, so nobody knows"):
        subject_of_run(tmp_path)


def test_all_figures_leave_the_first_step_out(run: Path) -> None:
    """A first step that waits for a minute is in no figure, and every figure agrees with its plot."""
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    records[0] |= {"step_s": 99.0, "exposed_s": 60.0, "idle_share": 0.9, "predicted_s": 20.0, "plan_s": 50.0}
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    subject = subject_of_run(run)
    warm = list(read_reports(run))[1:]
    gap = sum(report.predicted_s for report in warm) / sum(report.bound_s for report in warm) - 1
    idle = sum(report.idle_share for report in warm) / 2
    facts = dict(subject.facts)

    assert subject.verdict.startswith(f"After the first step, flexcp plans {gap:.1%} above the bound, and")
    assert f"without a task for {idle:.1%} of the time; 0.0% is spent waiting" in subject.verdict
    assert (facts["above the bound"], facts["idle"]) == (f"{gap:.1%}", f"{idle:.1%}")
    assert facts["a step"] == format_seconds(sum(report.step_s for report in warm) / 2)
    tokens = sum(report.tokens for report in warm) / sum(report.step_s for report in warm)
    assert facts["tokens/s"] == f"{tokens:,.0f}"
    assert facts["planning, mean"] == "2 ms"


def test_a_simulated_run_says_so(tmp_path: Path) -> None:
    """The same records, another word."""
    write_run(tmp_path, BATCHES, Cluster(8, 2048, 4), origin="simulated")
    subject = subject_of_run(tmp_path)
    text = page(subject)

    assert "simulated step times are as predicted" in subject.verdict
    assert subject.good
    assert "FlexCP · simulated run" in text
    assert 'data-name="simulated"' in text


def test_a_plan_is_read_back_as_it_was_written(plan_file: Path) -> None:
    """Both policies of the timeline, all steps of the curves, all rows of the table."""
    body = json.loads(plan_file.read_text())
    subject = subject_of_plan(plan_file)

    assert subject.verdict == body["verdict"]
    assert [panel.name for panel in subject.timelines[0].panels] == ["flexcp", body["baseline"]]
    assert subject.curves[0].values == tuple(s["step_s"] for s in body["policies"]["flexcp"]["steps"])
    assert [row.policy for row in subject.policies] == list(body["policies"])
    tokens = [t for s in body["policies"]["flexcp"]["steps"] for task in s["tasks"] for t in task["tokens"]]
    assert sum(subject.lengths.samples) == len(tokens) == 128
    assert sum(subject.lengths.tokens) == sum(tokens)
    assert max(subject.memory.peak_tokens) <= 16384
    assert plans_of(subject, 1)[0].step_s == body["policies"]["flexcp"]["steps"][1]["step_s"]


def test_every_plot_has_its_marks(run: Path) -> None:
    """Well-formed, and as many bars, boxes and lines as there are numbers."""
    subject = subject_of_run(run)
    tree = Tree(page(subject))

    boxes = [len(panel.boxes) for timeline in subject.timelines for panel in timeline.panels]
    assert tree.count("timeline", "task") == sum(boxes)
    assert tree.count("steps", "line") == 2 * 4  # a line and its key
    assert tree.count("gap", "line") == 2 * 2 + 1
    assert tree.count("prediction", "spot") == len(subject.pairs)
    assert tree.count("policies", "bar") == sum(not row.refusal for row in subject.policies)
    assert tree.count("lengths", "bar") == 2 * len(subject.lengths.samples)
    assert tree.count("degrees", "bar") == 2 * len(subject.degrees)
    assert tree.count("memory", "bar") == 8


def test_the_page_names_nothing_outside_of_itself(run: Path, plan_file: Path) -> None:
    """No address, no import; and the browser is told to fetch nothing and to run no script but its own."""
    for subject in (subject_of_run(run), subject_of_plan(plan_file)):
        text = page(subject)
        sources = [
            value
            for _, attributes, _ in Tree(text).elements
            for name, value in attributes.items()
            if name in ("src", "href") and not value.startswith("#")
        ]

        assert sources == ["data:,"]
        assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttp|import\(", text)
        policies = [
            attributes["content"]
            for _, attributes, _ in Tree(text).elements
            if attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        assert [policy.split(";")[0] for policy in policies] == ["default-src 'none'"]


def test_hostile_names_are_text(tmp_path: Path, plan_file: Path) -> None:
    """Names of models, files, policies and folders, verdicts and notices, come from outside."""
    write_run(tmp_path / "<img src=x onerror=alert(1)>", BATCHES, Cluster(8, 2048, 4), model=HOSTILE)
    body = json.loads(plan_file.read_text())
    body["policies"] = {f"{name}{HOSTILE}": policy for name, policy in body["policies"].items()}
    body["baseline"] += HOSTILE
    body["verdict"] += HOSTILE
    body["policies"] = {HOSTILE: {"refusal": HOSTILE}} | body["policies"]
    body["inputs"] |= {"lengths": [HOSTILE], "model": HOSTILE, "hardware": HOSTILE, "notices": [HOSTILE]}
    hostile = tmp_path / f"{HOSTILE.replace('/', '')}.json"
    hostile.write_text(json.dumps(body))
    for subject in (
        subject_of_run(tmp_path / "<img src=x onerror=alert(1)>"),
        subject_of_plan(hostile),
    ):
        text = page(subject)
        tree = Tree(text)

        assert [tag for tag, *_ in tree.elements if tag in ("script", "img")] == ["script"]
        assert not [
            name for _, attributes, _ in tree.elements for name in attributes if name.startswith("on")
        ]
        assert HOSTILE in "".join(tree.texts)


def test_wide_clusters_are_thinned_with_a_notice(tmp_path: Path) -> None:
    """Every k-th rank of many; the notice says which, and totals are of everything."""
    ranks = 1024
    lengths = [3000] * 40 + [200] * 3000
    write_run(tmp_path, [lengths], Cluster(ranks, 2048))
    subject = subject_of_run(tmp_path)
    tree = Tree(page(subject))

    assert "Timelines show every 16th of 1,024 ranks." in subject.notices
    assert any("counted on every 4th of 1,024 ranks, and scaled" in notice for notice in subject.notices)
    assert any(notice.startswith("Policies are not compared") for notice in subject.notices)
    assert sum(subject.lengths.samples) == pytest.approx(len(lengths), rel=0.1)
    assert 0 < tree.count("timeline", "task") <= 3000
    assert tree.count("memory", "bar") == 64
    assert len(page(subject)) < 2_000_000


def test_many_samples_are_a_histogram(tmp_path: Path) -> None:
    """A hundred thousand samples add nothing to the page but their counts."""
    write_run(tmp_path, [[40 + index % 500 for index in range(100_000)]], Cluster(4, 65536))
    subject = subject_of_run(tmp_path)

    assert sum(subject.lengths.samples) == pytest.approx(100_000)
    assert len(subject.lengths.samples) == 5
    assert len(page(subject)) < 300_000


def test_many_steps_are_thinned(tmp_path: Path) -> None:
    """Curves have at most 400 points, timelines a few steps, and both are said."""
    write_run(tmp_path, [[300, 500]] * 1000, Cluster(2, 2048))
    subject = subject_of_run(tmp_path)
    tree = Tree(page(subject))

    assert "Timelines are of 8 of 1,000 steps" in " ".join(subject.notices)
    assert tree.count("steps", "stop") == 334
    assert "334 of 1,000 steps" in "".join(tree.texts)
    assert len(subject_of_run(tmp_path, 777).timelines) == 8
    assert 777 in [timeline.step for timeline in subject_of_run(tmp_path, 777).timelines]
    assert '<option value="777" selected>' in page(subject_of_run(tmp_path, 777))


def test_a_resumed_run_shows_the_latest_attempt(run: Path) -> None:
    """Steps that were run again are taken from where they were run last."""
    again = run.parent / "again"
    write_run(again, BATCHES, Cluster(8, 2048, 4), slower=3.0)
    shutil.copytree(again / "trace" / "from-step-00000000", run / "trace" / "from-step-00000002")
    subject = subject_of_run(run)

    times = [timeline.panels[1].end_s / timeline.panels[0].end_s for timeline in subject.timelines]
    assert times == pytest.approx([1.2, 1.2, 3.0])
    assert sum(subject.lengths.samples) == pytest.approx(SAMPLES)


def break_run(run: Path, how: str) -> None:
    """Damage one thing."""
    info, metrics, trace = run / "run.json", run / "metrics.jsonl", trace_path(run, 0, 3)
    if how == "no info":
        info.unlink()
    elif how == "other schema":
        info.write_text(info.read_text().replace("flexcp.run/2", "flexcp.run/9"))
    elif how == "cut info":
        info.write_text(info.read_text()[:100])
    elif how == "no metrics":
        metrics.unlink()
    elif how == "empty metrics":
        metrics.write_text("")
    elif how == "bad metrics":
        metrics.write_text(metrics.read_text().replace('"step": 1,', '"step": NaN,'))
    elif how == "missing field":
        metrics.write_text(metrics.read_text().replace('"bound_s"', '"bond_s"'))
    elif how == "negative time":
        metrics.write_text(re.sub(r'"step_s": ', '"step_s": -', metrics.read_text()))
    elif how == "time runs back":
        trace.write_text(re.sub(r'"end_s":', '"end_s":-', trace.read_text()))
    elif how == "no trace":
        shutil.rmtree(run / "trace")
    elif how == "bad trace":
        trace.write_text(trace.read_text().replace('{"rank"', '{"rnk"', 1))
    elif how == "old trace":
        trace.write_text(trace.read_text().replace('"predicted_start_s"', '"started"'))


@pytest.mark.parametrize(
    ("how", "cause", "remedy"),
    [
        ("no info", "is not a run folder: it has no run.json", "flexcp train"),
        ("other schema", "schema 'flexcp.run/9', this version reads 'flexcp.run/2'", "the version of flexcp"),
        ("cut info", "run.json is damaged (JSONDecodeError", "Copy it again"),
        ("no metrics", "has no metrics.jsonl: the run ended before its first step", "at least one step"),
        ("empty metrics", "holds no whole step", "at least one step"),
        ("bad metrics", "metrics.jsonl, line 2, is damaged (ValueError: NaN", "Copy the folder again"),
        ("missing field", "metrics.jsonl, line 1, is damaged (KeyError: 'bound_s')", "Copy the folder"),
        ("negative time", "metrics.jsonl, line 1, is damaged (ValueError: step_s is -", "Copy the folder"),
        ("time runs back", "rank-3.jsonl, line 1, is damaged (ValueError: end_s is -", "Copy the folder"),
        ("no trace", "has no trace folder", "Copy the whole run folder"),
        ("bad trace", "rank-3.jsonl, line 1, is damaged (TypeError", "Copy the folder again"),
        ("old trace", "rank-3.jsonl: a task of step 0 lacks or garbles 'predicted_start_s'", "run again"),
    ],
)
def test_damaged_runs_are_named(run: Path, capfd, how: str, cause: str, remedy: str) -> None:
    """What is wrong, where, and what to do; through the command, with its exit code."""
    break_run(run, how)

    assert main(["report", str(run)]) == 2
    shown = capfd.readouterr().err
    assert cause in shown
    assert remedy in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda text: text[:2000], "plan.json is not whole JSON"),
        (
            lambda text: text.replace("flexcp.plan-report/2", "flexcp.plan/1"),
            "has the schema 'flexcp.plan/1'",
        ),
        (lambda text: "[1, 2]", "has no schema"),
        (lambda text: text.replace('"ranks_per_node"', '"rpn"'), "is damaged (KeyError: 'ranks_per_node')"),
        (lambda text: text.replace('"tokens": [', '"tokens": ["a", '), "is damaged (ValueError"),
        (lambda text: re.sub(r'"step_s": [\d.e-]+', '"step_s": NaN', text), "NaN is not a number of JSON"),
        (lambda text: re.sub(r'"tasks": ', '"no_tasks": ', text), "has no tasks: it is what --json prints"),
        (lambda text: json.dumps(json.loads(text) | {"policies": {"a": {"refusal": "why"}}}), "no plan: why"),
        (lambda text: text.replace('"start_s": 0.0', '"start_s": "soon"'), "is damaged (ValueError"),
        (lambda text: re.sub(r'"end_s": ', '"end_s": -', text), "a task goes from 0.0 s to -"),
        (
            lambda text: re.sub(r'"bound_s": [\d.e-]+', '"bound_s": 0', text),
            "is damaged (ValueError: bound_s is 0",
        ),
        (
            lambda text: re.sub(r'"ranks": \[[^]]*\]', '"ranks": []', text),
            "is damaged (ValueError: a task has no ranks",
        ),
    ],
)
def test_damaged_plans_are_named(plan_file: Path, tmp_path: Path, capfd, change, cause: str) -> None:
    """Truncated, of another schema, of another shape."""
    (tmp_path / "plan.json").write_text(change(plan_file.read_text()))

    assert main(["report", str(tmp_path / "plan.json")]) == 2
    shown = capfd.readouterr().err
    assert cause in shown
    assert "fix:" in shown
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["{run}", "--step", "9"], "there is no step 9"),
        (["{plan}", "--step", "2"], "there is no step 2"),
        (["{run}", "--out", "page.pdf"], "--out page.pdf is none of .html, .svg, .json"),
        (["{run}", "--out", "no/such/page.html"], "the folder of --out no/such/page.html does not exist"),
    ],
)
def test_wrong_arguments(run: Path, plan_file: Path, capfd, arguments: list[str], cause: str) -> None:
    """Each with a remedy."""
    named = [argument.format(run=run, plan=plan_file) for argument in arguments]

    assert main(["report", *named]) == 2
    shown = capfd.readouterr().err
    assert cause in shown
    assert "fix:" in shown


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything; whoever else runs the tests stays who they are."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "name", ["run.json", "metrics.jsonl", "trace/from-step-00000000/rank-0.jsonl", "trace", ""]
)
def test_what_may_not_be_read_is_named(run: Path, name: str) -> None:
    """A file, a folder in the run folder, or that itself."""
    with TemporaryDirectory() as folder:  # pytest's own is closed to others
        Path(folder).chmod(0o755)
        copy = shutil.copytree(run, Path(folder) / "run")
        hidden = copy / name
        hidden.chmod(0)
        try:
            for made in (subject_of_run, lambda given: list(latest_spans(given))):
                if made is not subject_of_run and not name.startswith("trace"):
                    continue
                with as_nobody(), pytest.raises(InputError, match=r"cannot be read \(Permission") as caught:
                    made(copy)
                assert str(hidden) in caught.value.cause
                assert caught.value.remedy
        finally:
            hidden.chmod(0o755)


def test_a_run_that_no_policy_can_plan_has_a_page(run: Path) -> None:
    """Its budget, as run.json has it, holds no sample: the page says so instead of drawing bars."""
    info = json.loads((run / "run.json").read_text())
    info["cluster"]["tokens_per_rank"] = 1
    (run / "run.json").write_text(json.dumps(info))
    subject = subject_of_run(run)

    assert all(row.refusal for row in subject.policies)
    assert "No policy can plan these samples." in page(subject)


def test_cut_files_are_shown_as_far_as_they_go(run: Path) -> None:
    """A killed run leaves unfinished lines: what is whole is shown, and the rest is said to be missing."""
    for path in (run / "metrics.jsonl", trace_path(run, 0, 5)):
        path.write_text(path.read_text()[:-30])
    trace_path(run, 0, 6).unlink()
    subject = subject_of_run(run)

    assert subject.steps == (0, 1)
    notices = " ".join(subject.notices)
    assert "metrics.jsonl ends inside a line" in notices
    assert "rank-5.jsonl ends inside a line" in notices
    assert "Traces of 1 ranks are missing, the first is 6." in notices


def test_a_run_without_info_is_told_from_one_that_has(run: Path) -> None:
    """What the readers of a folder say to a caller from Python."""
    assert read_info(run).cluster == Cluster(8, 2048, 4)
    assert [report.step for report in read_reports(run)] == [0, 1, 2]
    with pytest.raises(InputError, match="not a run folder"):
        read_info(run.parent)


def test_the_command_writes_page_svg_and_perfetto(run: Path, plan_file: Path, tmp_path: Path, capfd) -> None:
    """From a run and from a plan; the terminal shows both panels."""
    for source, names in ((run, ["predicted", "measured"]), (plan_file, ["flexcp", "static"])):
        outs = [tmp_path / f"{source.stem}-page{suffix}" for suffix in (".html", ".svg", ".json")]
        options = [word for out in outs for word in ("--out", str(out))]
        assert main(["report", str(source), "--step", "1", *options]) == 0
        shown = capfd.readouterr().out

        assert all(f"\n{name}\n" in shown for name in names)
        assert outs[0].read_text().startswith("<!doctype html>")
        svg = outs[1].read_text()
        assert svg.count('class="title"') == 2
        assert all(f"{name}: " in svg for name in names)
        events = json.loads(outs[2].read_text())["traceEvents"]
        assert {event["args"]["step"] for event in events if event["ph"] == "X"} >= {1}


def test_the_default_is_a_page_beside_the_input(run: Path, capfd) -> None:
    """In the run folder."""
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert f"wrote {run / 'report.html'}" in capfd.readouterr().out.replace("\n", "")


def test_spans_of_tasks_say_what_reports_need(run: Path) -> None:
    """Rows of all ranks of a group add up to its tokens."""
    rows: dict[tuple[int, ...], int] = {}
    tokens: dict[tuple[int, ...], int] = {}
    for rank in range(8):
        for span in read_spans(trace_path(run, 0, rank)):
            if span.name == "task":
                key = tuple(span.detail["samples"])
                rows[key] = rows.get(key, 0) + span.detail["rows"]
                tokens[key] = sum(span.detail["tokens"])

    assert rows == tokens
    assert sum(tokens.values()) == sum(map(sum, BATCHES))


def test_two_runs_side_by_side(tmp_path: Path, capfd) -> None:
    """Of the second all tasks take half as long: figures of both, their ratio, and both on one plot."""
    write_run(tmp_path / "before", BATCHES, Cluster(8, 2048, 4), slower=2.0)
    write_run(tmp_path / "after", [*BATCHES, BATCHES[0]], Cluster(8, 2048, 4), slower=1.0)
    (tmp_path / "before" / "metrics.jsonl").write_text(
        (tmp_path / "before" / "metrics.jsonl").read_text().replace('"mfu": null', '"mfu": 0.2')
    )
    assert main(["report", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    said = " ".join(capfd.readouterr().out.split())
    subjects = [subject_of_run(tmp_path / name) for name in ("before", "after")]
    both = compared(*subjects).beside
    rows = {name: values for name, *values in both.rows}
    rates = [subject.figures.tokens_per_s for subject in subjects]
    tree = Tree((tmp_path / "before" / "report.html").read_text())

    assert f"after is {rates[1] / rates[0]:.2f}× the speed of before: {rates[1]:,.0f} tokens/s" in said
    assert rows["tokens/s"] == [f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0]:.3f}×"]
    real = [subject.figures.measured_s for subject in subjects]
    assert rows["tasks of a step, real"][2] == f"{real[1] / real[0]:.3f}×"
    assert rows["MFU"] == ["20.0%", "–", "–"]
    assert rows["prediction off by"] == ["100.0%", "0.0%", "-100.0 points"]
    assert rows["steps"] == ["0 to 2", "0 to 3", ""]
    assert "policy" not in rows
    assert both.steps == (0, 1, 2)
    assert [curve.values for curve in both.curves] == [subject.curves[0].values[:3] for subject in subjects]
    assert tree.count("beside", "line") == 2 * 2
    assert tree.count("beside", "stop") == 3


def test_only_runs_lie_side_by_side(run: Path, plan_file: Path, capfd) -> None:
    """Not a run and a plan, nor three."""
    for sources, cause in (
        ([run, plan_file], "plan.json is a plan, and two runs are compared"),
        ([plan_file, run], "plan.json is a plan, and two runs are compared"),
        ([run, run, run], "3 runs are too many to lie side by side"),
        ([run, run / "nowhere"], "nowhere does not exist"),
    ):
        assert main(["report", *map(str, sources)]) == 2
        assert cause in " ".join(capfd.readouterr().err.split())
