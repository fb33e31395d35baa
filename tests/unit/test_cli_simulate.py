"""`flexcp simulate` as a user meets it: answers, run folders, and the text of every error."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.test_cli import flat

from flexcp.cli import main
from flexcp.cli.simulated import SimulatedRun, Simulation
from flexcp.core.run_folder import read_info, read_reports, trace_path
from flexcp.core.trace import read_spans
from flexcp.report.tables import format_seconds
from flexcp.simulate import Conditions, Failure

LENGTHS = Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json"
CALL = ["simulate", str(LENGTHS), "--model", "qwen3-8b", "--ranks", "16", "--tokens-per-rank", "16384"]
CALL += ["--global-batch", "100", "--steps", "3"]


def told(capfd, *options: str) -> dict:
    """What `--json` prints."""
    assert main([*CALL, *options, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def steps_s(body: dict) -> list[float]:
    """Time of each step."""
    return [step["step_s"] for step in body["steps"]]


def planned_s(body: dict) -> list:
    """What each step should take, up to the rounding of sums."""
    return [pytest.approx(step["predicted_s"], rel=1e-12) for step in body["steps"]]


def test_steps_are_those_planned_and_the_same_every_time(capfd):
    """Without a reduction a step takes what its plan predicts; the JSON has its documented shape."""
    body = told(capfd, "--reduce", "none")

    assert list(body) == ["schema", "inputs", "conditions", "steps"]
    assert body["schema"] == "flexcp.simulation/1"
    assert steps_s(body) == planned_s(body)
    assert body == told(capfd, "--reduce", "none")
    assert [sum(step["shares"].values()) for step in body["steps"]] == pytest.approx([1.0] * 3)


def test_every_condition_shows(capfd):
    """Each option makes the run slower by what it stands for, and is named in the JSON."""
    plain = told(capfd, "--reduce", "none")
    for options, part in [
        (["--jitter", "0.1"], "pace"),
        (["--slow-rank", "3=0.5", "--slow-rank", "4=0.6"], "pace"),
        (["--cores", "4"], "sharing"),
        (["--optimizer", "0.5"], "optimizer"),
        (["--planning", "100"], "wait"),
        (["--data", "100"], "wait"),
    ]:
        body = told(capfd, "--reduce", "none", *options)
        assert body["conditions"] != plain["conditions"]
        assert sum(steps_s(body)) > sum(steps_s(plain))
        assert body["steps"][0]["shares"][part] > plain["steps"][0]["shares"][part] == 0
    crossing = ["--reduce", "none", "--policy", "ulysses", "--ranks-per-node", "2"]
    free, shared = told(capfd, *crossing), told(capfd, *crossing, "--uplinks", "1")
    assert sum(steps_s(shared)) > sum(steps_s(free))
    assert shared["steps"][0]["shares"]["sharing"] > free["steps"][0]["shares"]["sharing"] == 0
    ends, overlaps = told(capfd), told(capfd, "--reduce", "overlap")
    assert sum(steps_s(ends)) > sum(steps_s(overlaps)) > sum(steps_s(plain))


def test_policies_and_modes_are_those_of_plan(capfd):
    """Also the one that exchanges heads, at its own prices."""
    for options in (["--policy", "ulysses"], ["--policy", "paper", "--mode", "lockstep"]):
        body = told(capfd, "--reduce", "none", *options)
        assert steps_s(body) == planned_s(body)


def test_a_run_is_longer_than_its_data(capfd):
    """Epochs follow each other, as in training."""
    body = told(capfd, "--global-batch", "2000", "--steps", "4")
    lengths = json.loads(LENGTHS.read_text())

    assert sum(step["tokens"] for step in body["steps"]) > 3 * sum(lengths)


def test_the_table_and_the_folder(tmp_path, capfd):
    """What a person sees, and what a report reads."""
    assert main([*CALL, "--jitter", "0.05", "--out", str(tmp_path / "run")]) == 0
    shown = flat(capfd.readouterr().out)
    reports = list(read_reports(tmp_path / "run"))

    for text in ("steps", "tokens/s", "computing", "idle, no task", "gradient reduction", "wrote"):
        assert text in shown
    assert [report.step for report in reports] == [0, 1, 2]
    info = read_info(tmp_path / "run")
    assert (info.origin, info.model, info.cluster.ranks) == ("simulated", "qwen3-8b", 16)
    spans = list(read_spans(trace_path(tmp_path / "run", 0, 15)))
    assert {span.name for span in spans} == {"task", "reduce"}


def test_report_draws_a_simulated_run(tmp_path, capfd):
    """Also where a rank is slow; a loss is not made up."""
    assert main([*CALL, "--slow-rank", "2=0.5", "--out", str(tmp_path / "run")]) == 0
    code = main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")])

    assert code == 0, capfd.readouterr().err
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "simulated" in page
    assert ">loss<" not in page


def test_a_failed_rank_is_an_error_and_leaves_its_steps(tmp_path, capfd):
    """Exit code 1, rank, time and step named; what was done is in the folder."""
    done_s = steps_s(told(capfd))
    at_s = done_s[0] + 0.5 * done_s[1]
    code = main([*CALL, "--fail", f"5@{at_s}", "--out", str(tmp_path / "run")])
    out, err = capfd.readouterr()

    assert code == 1
    assert f"rank 5 failed {at_s:g} s into the simulated run, in step 1" in flat(err)
    assert "flexcp train --resume" in flat(err)
    assert "tokens/s" in out
    assert len(list(read_reports(tmp_path / "run"))) == 1
    spans = list(read_spans(trace_path(tmp_path / "run", 0, 5)))
    assert max(span.end_s for span in spans) == at_s


def test_a_failure_that_comes_too_late_is_said(capfd):
    """The run is over by then; nobody should take it for a run that survived."""
    assert main([*CALL, "--fail", "5@9999"]) == 0

    assert "Rank 5 has no time to fail" in flat(capfd.readouterr().out)


def test_the_worst_day_is_still_json(capfd):
    """At every limit at once no number leaves what JSON can hold."""
    worst = ["--jitter", "2", "--optimizer", "1e6", "--planning", "1e6", "--data", "1e6", "--cores", "1"]
    worst += ["--uplinks", "1", "--slow-rank", "3=0.001", "--slow-rank", "4=1000", "--reduce", "overlap"]
    assert main([*CALL, *worst, "--json"]) == 0
    body = json.loads(capfd.readouterr().out, parse_constant=pytest.fail)

    assert all(step["step_s"] > 1e6 for step in body["steps"])


def test_memory_and_sharding_decide_the_tokens_of_a_rank(capfd):
    """As for plans."""
    call = [part for part in CALL if part not in ("--tokens-per-rank", "16384")]
    held = []
    for memory in ("80GB", "90GB"):
        options = ["--memory", memory, "--sharding", "zero3", "--mode", "lockstep", "--steps", "1", "--json"]
        assert main([*call, *options]) == 0
        held.append(json.loads(capfd.readouterr().out)["inputs"]["tokens_per_rank"])

    assert held[0] < held[1]


FROM_MEMORY = [part for part in CALL if part not in ("--tokens-per-rank", "16384")]


def test_what_shardings_exchange_is_in_the_times(capfd):
    """In lockstep: nothing hides it, or tasks do; the tasks themselves take what the plan says."""
    bodies = {}
    for sharding in ("zero1", "zero2", "zero3"):
        for reduce in ("end", "overlap", "none"):
            options = ["--mode", "lockstep", "--sharding", sharding, "--reduce", reduce, "--json"]
            assert main([*FROM_MEMORY, *options]) == 0
            bodies[sharding, reduce] = json.loads(capfd.readouterr().out)["steps"][0]
    gathered = {key: step["gather_s"] for key, step in bodies.items()}

    assert all(step["measured_s"] == pytest.approx(step["predicted_s"]) for step in bodies.values())
    assert gathered["zero3", "end"] > gathered["zero2", "end"] > 0 == gathered["zero1", "end"]
    assert gathered["zero3", "overlap"] < gathered["zero3", "end"]
    assert gathered["zero3", "none"] == 0
    assert bodies["zero1", "end"]["reduce_s"] > bodies["zero2", "end"]["reduce_s"] > 0
    assert bodies["zero3", "end"]["reduce_s"] == pytest.approx(0, abs=1e-9)
    for step in bodies.values():
        assert sum(step["shares"].values()) == pytest.approx(1.0)
        assert step["shares"]["gather"] == pytest.approx(step["gather_s"] / step["step_s"])


def test_shardings_that_need_waves_are_refused_to_run_freely(capfd):
    """The remedy says what training has; `plan`, which prices none of it, says so."""
    assert main([*FROM_MEMORY, "--sharding", "zero3"]) == 2
    shown = flat(capfd.readouterr().err)
    assert "zero3 exchanges weights or gradients of all ranks while tasks run" in shown
    assert "Give --mode lockstep, or zero1: FSDP2 as flexcp train runs it" in shown

    plan = ["plan", *FROM_MEMORY[1:], "--sharding", "zero3", "--json"]
    assert main(plan) == 0
    notices = " ".join(json.loads(capfd.readouterr().out)["inputs"]["notices"])
    assert "zero3 decides the tokens of a rank here and is not in the times" in notices


def test_policies_meet_the_same_day(capfd):
    """Several in one call are what each is alone; quantiles are those of its steps."""
    day = ["--jitter", "0.1", "--jitter-seed", "5"]
    together = told(capfd, "--policy", "flexcp,static", *day)
    alone = {name: told(capfd, "--policy", name, *day) for name in ("flexcp", "static")}

    assert {name: body["steps"] for name, body in together["policies"].items()} == {
        name: body["steps"] for name, body in alone.items()
    }
    other = told(capfd, "--policy", "flexcp", "--jitter", "0.1", "--jitter-seed", "6")
    assert [step["tokens"] for step in other["steps"]] == [
        step["tokens"] for step in alone["flexcp"]["steps"]
    ]
    assert steps_s(other) != steps_s(alone["flexcp"])
    assert main([*CALL, "--policy", "all", *day]) == 0
    shown = capfd.readouterr().out
    median_s = float(np.median(steps_s(alone["static"])))
    row = next(line for line in shown.splitlines() if line.startswith("static"))
    assert format_seconds(median_s) in row
    assert "1.00×" in row
    assert "flexsp: solves integer programmes" in shown


def test_notices_are_told_once_and_change_nothing(capfd):
    """A failure that comes too late is in the record too."""
    body = told(capfd, "--fail", "5@9999")

    assert [notice for notice in body["inputs"]["notices"] if "no time to fail" in notice] == [
        "Rank 5 has no time to fail: the run ends before 9999 s."
    ]
    request = SimpleNamespace(inputs={"notices": ["as read"]})
    day = Conditions(failure=Failure(0, 9.0))
    made = Simulation(request, day, (SimulatedRun("flexcp", steps=(None,)),))
    assert made.notices == made.notices == ["as read", "Rank 0 has no time to fail: the run ends before 9 s."]
    assert request.inputs == {"notices": ["as read"]}


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        (["--fail", "5"], "--fail 5 cannot be read", "Give RANK@SECONDS, such as 5@120."),
        (["--fail", "5@soon"], "--fail 5@soon cannot be read", "Give RANK@SECONDS"),
        (["--fail", "16@1"], "there is no rank 16 among 16", "Ranks are 0 to 15."),
        (["--slow-rank", "3"], "--slow-rank 3 cannot be read", "Give RANK=SPEED, such as 3=0.7."),
        (["--slow-rank", "3=0"], "the speed of rank 3 is 0.0", "Speeds lie between 0.001 and 1000"),
        (["--slow-rank", "3=1e-300"], "the speed of rank 3 is 1e-300", "Speeds lie between"),
        (["--slow-rank", "3=nan"], "the speed of rank 3 is nan", "Speeds lie between"),
        (["--slow-rank", "3=0.5", "--slow-rank", "3=0.9"], "--slow-rank names rank 3 twice", "one speed"),
        (["--jitter", "2.1"], "jitter is 2.1", "at most 2"),
        (["--optimizer", "1e308"], "optimizer_s is 1e+308", "at most 1e+06"),
        (["--planning", "1e7"], "plan_s is 10000000.0", "at most 1e+06"),
        (["--data", "inf"], "data_s is inf", "at most 1e+06"),
        (["--memory", "64GiB"], "--tokens-per-rank and --memory are both given", "Leave one out"),
        (["--reduce", "ovrlap"], "unknown reduction 'ovrlap'", "Did you mean 'overlap'?"),
        (["--policy", "flexcp,al"], "unknown policy 'al'", "Known: all, flexcp"),
        (
            ["--policy", "all", "--out", "new"],
            "--out new is one run, and there are 6 policies",
            "Give one policy",
        ),
        (["--sharding", "zero3"], "--tokens-per-rank and --sharding are both given", "Leave one out"),
        (["--jitter-seed", "-1"], "seed is -1", "at least 0"),
        (["--uplinks", "-1"], "uplinks is -1", "leave it out for no limit"),
        (["--cores", "-1"], "cores is -1", "leave it out for no limit"),
        (["--jitter", "-1"], "jitter is -1.0", "at least 0"),
        (["--uplinks", "0"], "uplinks is 0", "leave it out for no limit"),
        (["--planning", "nan"], "plan_s is nan", "plan_s is a number"),
        (["--steps", "0"], "--steps is 0", "--steps is at least 1."),
        (["--seed", "-1"], "seed is -1", "at least 0"),
        (["--tokens-per-rank", "100"], "16 ranks x 100 tokens hold 1600", "It fits on"),
        (["--out", str(LENGTHS)], "is not an empty folder", "Name a new one"),
    ],
)
def test_what_cannot_be_used_is_named(capfd, options, cause, remedy):
    """Exit code 2, one line of cause, one line of remedy, nothing else."""
    assert main([*CALL, *options]) == 2
    out, err = capfd.readouterr()

    assert out == ""
    assert cause in flat(err)
    assert remedy in flat(err)
