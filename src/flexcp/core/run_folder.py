"""The files of a run folder, the same for measured and simulated runs: where they lie and how they read.

run.json                             what ran, on what
metrics.jsonl                        one line a step (`core.metrics`), and one an evaluation
trace/from-step-*/rank-*.jsonl       spans of each rank (`core.trace`), one folder an attempt
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.jsonl import parse_json, read_lines, readable, whole
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Mode

RUN_SCHEMA = "flexcp.run/1"

Origin = Literal["measured", "simulated"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What ran.

    Attributes:
        origin: whether its times are `measured` or `simulated`.
        model, hardware: names, as the user gave them.
        policy, mode, cluster, whole_below_tokens: of all its plans; see `core.plan.Plan`.
        coefficients: of the cost model that predicted, as in the JSON of `flexcp plan`.
    """

    origin: Origin
    model: str
    hardware: str
    policy: str
    mode: Mode
    cluster: Cluster
    whole_below_tokens: int
    coefficients: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write `run.json`."""
        body = {"schema": RUN_SCHEMA, **asdict(self)}
        (folder / "run.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def read_info(folder: Path) -> RunInfo:
    """Read `run.json`.

    Raises:
        InputError: there is none, or it is not what this version writes.
    """
    path = folder / "run.json"
    with readable(path):
        there = path.is_file()
    if not there:
        raise InputError(
            f"{folder} is not a run folder: it has no run.json",
            "Give the folder that flexcp train wrote (run.folder), or the .json of flexcp plan --out.",
        )
    try:
        with readable(path):
            body = parse_json(path.read_text(encoding="utf-8"))
        schema = body.pop("schema")
        if schema != RUN_SCHEMA:
            raise InputError(
                f"{path} has the schema {schema!r}, this version reads {RUN_SCHEMA!r}",
                "Read it with the version of flexcp that wrote it, or run again.",
            )
        return _checked(RunInfo(**{**body, "cluster": Cluster(**body["cluster"])}))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged ({type(error).__name__}: {error})",
            "Copy it again; a run that was resumed writes it anew.",
        ) from None


def _checked(info: RunInfo) -> RunInfo:
    for name in ("model", "hardware", "policy"):
        if not isinstance(getattr(info, name), str):
            raise ValueError(f"{name} is {getattr(info, name)!r}")
    for name, known in (("origin", get_args(Origin)), ("mode", get_args(Mode))):
        if getattr(info, name) not in known:
            raise ValueError(f"{name} is {getattr(info, name)!r}")
    for name in ("ranks", "tokens_per_rank", "ranks_per_node"):
        whole(getattr(info.cluster, name), name, 1)
    whole(info.whole_below_tokens, "whole_below_tokens")
    return info


def trace_path(folder: Path, first_step: int, rank: int) -> Path:
    """Spans of one rank of one attempt; clocks of different attempts do not share an origin."""
    return folder / "trace" / f"from-step-{first_step:08d}" / f"rank-{rank}.jsonl"


def metrics_path(folder: Path) -> Path:
    """Where the lines of steps and evaluations are."""
    return folder / "metrics.jsonl"


def read_reports(folder: Path) -> Iterator[StepReport]:
    """Steps in the order written; a last line that a killed run left unfinished is dropped.

    Raises:
        InputError: there is no such file, or a line is damaged; it is named.
    """
    path = metrics_path(folder)
    with readable(path):
        there = path.is_file()
    if not there:
        raise InputError(
            f"{folder} has no {path.name}: the run ended before its first step",
            "Give the folder of a run that has done at least one step.",
        )
    reports = read_lines(path, lambda record: StepReport.from_record(record) if "step" in record else None)
    return (report for report in reports if report is not None)
