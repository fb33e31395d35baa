"""Planning beside training: the same plans from another process, and what happens when that process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.errors import FlexCPError, RunError, SampleTooLongError
from flexcp.core.model_shape import ModelShape
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.cost.model import cost_model
from flexcp.cost.presets import hardware
from flexcp.planner import Planner, serve
from flexcp.planner.check import check_answer
from flexcp.runtime import planning, stopped
from flexcp.runtime.planning import PlannerProcess, Planning

SHAPE = ModelShape("tiny", 2, 32, 4, 2, 8, 48, 97)
PLANNER = Planner(Cluster(6, 1000, 3), cost_model(SHAPE, hardware("cpu")))
UNEQUAL = Cluster(2, 50, 1, speeds=(1.0, 0.25))
SAMPLES = samples_from_lengths([5000, 1200, 700, 700, 90, 3, 1])


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def process(notices: list[str]) -> Iterator[PlannerProcess]:
    process = PlannerProcess(notices.append)
    yield process
    process.end()
    process.close()


def kill(process: PlannerProcess) -> int:
    """Its id; returns when it is dead."""
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    wait_for_the_end_of(pid)
    return pid


def wait_for_the_end_of(pid: int) -> None:
    end_s = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < end_s, "it lives on"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Also if nobody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    "planner",
    [PLANNER, replace(PLANNER, cluster=UNEQUAL, policy="ulysses", mode="lockstep", whole_below_tokens=7)],
    ids=["default", "every field"],
)
def test_a_request_arrives_as_it_was(planner: Planner) -> None:
    """To the bit, with speeds, links and spans; so the plan is the one made here."""
    samples = (Sample(9, 40, spans=((3, 9), (10, 12))), Sample(2, 1, encoder_pairs=5))

    assert serve.read_request(serve.request_line(planner, samples)) == (planner, samples)


def test_a_process_plans_as_this_one_does(process: PlannerProcess, notices: list[str]) -> None:
    """Several requests over one process, the same text each time."""
    expected = PLANNER(SAMPLES)
    texts = [process.ask(serve.request_line(PLANNER, SAMPLES)) for _ in range(3)]

    assert texts == [expected.to_json()] * 3
    assert Plan.from_json(texts[0]) == expected
    assert notices == []


def test_what_the_planner_raises_arrives_whole(process: PlannerProcess) -> None:
    """Of the same kind; the process lives on."""
    with pytest.raises(SampleTooLongError, match="sample 0 has 9000 tokens") as caught:
        process.ask(serve.request_line(PLANNER, samples_from_lengths([9000])))

    assert "It fits on 9 ranks" in caught.value.remedy
    with pytest.raises(FlexCPError, match="KeyError: 'cost'"):
        process.ask('{"planner": {}, "samples": []}\n')
    assert process.ask(serve.request_line(PLANNER, SAMPLES)) == PLANNER(SAMPLES).to_json()


def test_a_dead_process_is_started_again_once_and_then_named(
    process: PlannerProcess, notices: list[str]
) -> None:
    """Killed between requests: nothing is lost. Killed again: the sentence names it and how it died."""
    request = serve.request_line(PLANNER, SAMPLES)
    before = process.ask(request)
    first = kill(process)
    assert process.ask(request) == before
    assert process.pid != first
    assert len(notices) == 1
    assert notices[0].startswith(
        f"the planner process {first} of rank 0 was killed by SIGKILL; it was started"
    )
    second = kill(process)
    with pytest.raises(RunError) as caught:
        process.ask(request)

    assert caught.value.cause == (
        f"the planner process {second} of rank 0 was killed by SIGKILL, after it had been started again once"
    )
    assert "Continue from a checkpoint" in caught.value.remedy
    assert len(notices) == 1


def test_a_process_killed_while_it_plans_loses_nothing(notices: list[str]) -> None:
    """The request under way is asked again of the next process."""
    planning = Planning(PLANNER, notices.append)
    assert planning.process is not None
    try:
        os.kill(planning.process.pid, signal.SIGSTOP)  # it has the request and will never answer
        future = planning.submit(SAMPLES)
        time.sleep(0.2)
        assert not future.done()
        os.kill(planning.process.pid, signal.SIGKILL)
        assert future.result(timeout=60).text == PLANNER(SAMPLES).to_json()
    finally:
        planning.close()
    assert len(notices) == 1


def test_closing_does_not_wait_for_a_plan(notices: list[str]) -> None:
    """A plan under way and one behind it fail; no process is left, and none is started again."""
    planning = Planning(PLANNER, notices.append)
    assert planning.process is not None
    os.kill(planning.process.pid, signal.SIGSTOP)
    under_way = [planning.submit(SAMPLES) for _ in range(2)]
    pid = planning.process.pid
    planning.close()

    for future in under_way:
        assert isinstance(future.exception(timeout=0), RunError)
    assert not Path(f"/proc/{pid}").exists()
    assert notices == []


def test_the_process_needs_no_torch_and_ends_with_its_input() -> None:
    """What rank 0 starts is light, keeps strays off its answers, and leaves when nobody can ask."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from flexcp.planner import serve\n"
        "answer = serve.answer_line\n"
        "serve.answer_line = lambda request: (print('a stray line', flush=True), answer(request))[1]\n"
        f"serve.main({os.getpid()})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        input=serve.request_line(PLANNER, SAMPLES),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"plan {PLANNER(SAMPLES).to_json()}\n"
    assert ran.stderr == "a stray line\n"


@pytest.mark.parametrize("leaves_after_s", [0.1, 4.0], ids=["at once", "in the middle of a plan"])
def test_the_process_does_not_outlive_its_parent(leaves_after_s: float) -> None:
    """A rank that is killed leaves nothing behind that plans on."""
    code = (
        "import sys, time\n"
        "time.sleep(1)\n"  # until its parent is gone
        "from flexcp.planner import serve\n"
        "serve.answer_line = lambda request: time.sleep(600)\n"
        "serve.main(int(sys.argv[1]))"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"command = [sys.executable, '-c', {code!r}, str(os.getpid())]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)\n"
        "child.stdin.write('a request\\n')\n"
        "child.stdin.flush()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(float(sys.argv[1]))\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", parent, str(leaves_after_s)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    wait_for_the_end_of(int(ran.stdout))
    assert ran.returncode == -signal.SIGKILL


def test_a_stopped_process_is_ended_and_started_again(
    process: PlannerProcess, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who waits for its answer could tell it from one that plans for long."""
    monkeypatch.setattr(stopped, "STOPPED_S", 1.0)
    process._stopped_watch = stopped.StoppedWatch()
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)

    assert process.ask(serve.request_line(PLANNER, SAMPLES)) == PLANNER(SAMPLES).to_json()
    assert has_ended(pid)
    [notice] = notices
    assert notice.startswith(
        f"the planner process {pid} of rank 0 was stopped (SIGSTOP) for 1 s and ended; it was started"
    )


def test_a_process_whose_asker_is_gone_says_nothing() -> None:
    """A killed rank 0 is named by the launcher; a trace of its planner would only hide that."""
    command = [sys.executable, "-c", planning._SERVE, json.dumps(sys.path), str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as asked:
        assert asked.stdin is not None
        assert asked.stdout is not None
        assert asked.stderr is not None
        asked.stdout.close()
        asked.stdin.write(serve.request_line(PLANNER, SAMPLES))
        asked.stdin.close()

        assert asked.stderr.read() == ""
        assert asked.wait() == 1


class Own:
    """A planner of the user's own."""

    cluster = PLANNER.cluster

    def __init__(self, plan: Callable[[Sequence[Sample]], Any]) -> None:
        self._plan = plan

    def __call__(self, samples: Sequence[Sample]) -> Any:
        return self._plan(samples)


def twice(samples: Sequence[Sample]) -> Plan:
    """Every task is run by a rank and once more by itself."""
    plan = PLANNER(samples)
    return replace(plan, tasks=tuple(replace(task, ranks=(0, 0)) for task in plan.tasks))


def no_idea(samples: Sequence[Sample]) -> Plan:
    raise LookupError("no idea")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (lambda samples: None, "the plan of Own cannot run: it is a NoneType"),
        (lambda samples: PLANNER(samples[1:]), "its samples are others than those that were to be planned"),
        (lambda samples: PLANNER(samples[::-1]), "its samples are others than those that were to be planned"),
        (replace(PLANNER, cluster=Cluster(7, 1000, 3)), "it is for 7 ranks of 6"),
        (twice, "task 0 names rank 0 2 times"),
        (no_idea, r"Own raised LookupError: no idea \(.*test_planning.py, line "),
    ],
)
def test_a_planner_of_ones_own_is_not_taken_at_its_word(
    notices: list[str], plan: Callable[[Sequence[Sample]], Any], words: str
) -> None:
    """Another plan than the one asked for would train other samples, or hang."""
    planning_own = Planning(Own(plan), notices.append)
    with pytest.raises(RunError, match=words):
        planning_own.submit(SAMPLES).result()
    planning_own.close()
    assert check_answer(PLANNER(SAMPLES), SAMPLES, PLANNER.cluster) == ()


def test_an_error_does_not_wait_for_a_planner_that_hangs(notices: list[str]) -> None:
    """The other ranks would, for this rank's word."""
    go_on = threading.Event()
    planning_own = Planning(Own(lambda samples: go_on.wait(60)), notices.append)
    answer = planning_own.submit(SAMPLES)
    planning_own.close(wait=False)
    had_answered = answer.done()
    go_on.set()
    with pytest.raises(RunError, match="it is a bool"):
        answer.result(60)

    assert not had_answered
