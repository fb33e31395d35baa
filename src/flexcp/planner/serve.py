"""Plans for another process: a request a line on stdin, an answer a line on stdout, all of it JSON.

`runtime.planning` starts it beside rank 0, so that planning holds no training process's interpreter lock.
It imports no torch, remembers nothing from one request to the next, and ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flexcp.core.cluster import Cluster
from flexcp.core.errors import error_from_json, error_to_json
from flexcp.core.plan import sample_from_json, sample_to_json
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Link
from flexcp.planner.make import Planner

_LOOK_S = 1.0


def request_line(planner: Planner, samples: Sequence[Sample]) -> str:
    """Everything that the plan depends on."""
    batch = [sample_to_json(sample) for sample in samples]
    return json.dumps({"planner": asdict(planner), "samples": batch}) + "\n"


def read_request(line: str) -> tuple[Planner, tuple[Sample, ...]]:
    """What `request_line` wrote, equal to the bit."""
    body = json.loads(line)
    samples = tuple(sample_from_json(entry) for entry in body["samples"])
    return _planner_from_json(body["planner"]), samples


def answer_line(request: str) -> str:
    """The plan as `Plan.to_json` writes it, or why there is none."""
    try:
        planner, samples = read_request(request)
        return f"plan {planner(samples).to_json()}\n"
    except Exception as error:  # whoever asked must hear of it, whatever went wrong
        return f"error {error_to_json(error)}\n"


def read_answer(line: str) -> str:
    """JSON of the plan.

    Raises:
        FlexCPError: planning failed; what the planner raised.
    """
    kind, _, text = line.rstrip("\n").partition(" ")
    if kind == "error":
        raise error_from_json(text)
    return text


def _planner_from_json(body: dict[str, Any]) -> Planner:
    cost = body["cost"]
    links = {name: Link(**cost[name]) for name in ("intra", "inter")}
    return Planner(**{**body, "cluster": Cluster(**body["cluster"]), "cost": CostModel(**{**cost, **links})})


def main(parent: int) -> None:
    """Answer until the input ends, or the process `parent` that asks is gone.

    It says who it is: it may be gone before this one can look.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not pass for an answer
    try:
        for request in sys.stdin:
            answers.write(answer_line(request))
            answers.flush()
    except BrokenPipeError:
        os._exit(1)  # whoever asked is gone; the way out would flush once more


def _end_with(parent: int) -> None:
    """A plan may take long, and nobody waits for it any more."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
