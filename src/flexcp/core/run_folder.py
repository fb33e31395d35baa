"""The files of a run folder, the same for measured and simulated runs: where they lie and how they read.

run.json                             what ran, on what, in the newest attempt
metrics.jsonl                        one line a step (`core.metrics`), and one an evaluation
trace/from-step-*/run.json           what ran in one attempt: it may have other ranks, budgets or costs
trace/from-step-*/rank-*.jsonl       spans of each rank in that attempt (`core.trace`)
.lock                                held by the process that writes the others
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, InputError
from flexcp.core.jsonl import parse_json, read_lines, readable, whole
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Mode

RUN_SCHEMA = "flexcp.run/2"

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

    def write(self, folder: Path, first_step: int = 0) -> None:
        """Write `run.json`, of the run and of the attempt that begins with a step; folders are made."""
        text = json.dumps({"schema": RUN_SCHEMA, **asdict(self)}, indent=1) + "\n"
        for where in (folder, attempt_path(folder, first_step)):
            where.mkdir(parents=True, exist_ok=True)
            (where / "run.json").write_text(text, encoding="utf-8")


def claim(folder: Path) -> IO[str]:
    """The lock of a run folder, until it is closed or this process ends: two runs would mix their lines.

    Where system or disk know no locks, none is taken.

    Raises:
        ConfigError: another process has it.
        OSError: the folder cannot be written.
    """
    file = (folder / ".lock").open("a")
    try:
        import fcntl  # Windows has none, and reads run folders

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"another run is writing to {folder}",
            "Wait for its end, or choose another folder with --set run.folder=…",
        ) from None
    except (OSError, ImportError):
        pass
    return file


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run: what ran from `first_step` to before `upto`, where a later one took over (or None).

    A run that was resumed may have gone on with other ranks, budgets, policies or costs.
    """

    first_step: int
    upto: int | None
    info: RunInfo

    def covers(self, step: int) -> bool:
        """Whether a step is its, and not that of a later attempt."""
        return self.first_step <= step and (self.upto is None or step < self.upto)


def read_attempts(folder: Path) -> tuple[Attempt, ...]:
    """All attempts that left traces, in order.

    Raises:
        InputError: there are none, or the `run.json` of one is missing or damaged.
    """
    trace = folder / "trace"
    with readable(trace):  # a pattern would pass over a folder that cannot be read
        names = [path.name for path in trace.iterdir()] if trace.is_dir() else []
    ends = [name.removeprefix("from-step-") for name in names if name.startswith("from-step-")]
    firsts = sorted(int(end) for end in ends if end.isdecimal())
    if not firsts:
        raise InputError(
            f"{folder} has no trace folder, so nobody knows what ran where",
            "Copy the whole run folder; trace/ is written beside metrics.jsonl.",
        )
    infos = [_read_attempt(attempt_path(folder, first)) for first in firsts]
    return tuple(map(Attempt, firsts, [*firsts[1:], None], infos))


def _read_attempt(folder: Path) -> RunInfo:
    path = folder / "run.json"
    with readable(path):
        there = path.is_file()
    if not there:
        raise InputError(
            f"{folder} has no run.json, so nobody knows how many ranks ran there",
            "Copy the whole run folder.",
        )
    return _parsed_info(path)


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
    return _parsed_info(path)


def _parsed_info(path: Path) -> RunInfo:
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


def attempt_path(folder: Path, first_step: int) -> Path:
    """The folder of one attempt; clocks of different attempts do not share an origin."""
    return folder / "trace" / f"from-step-{first_step:08d}"


def trace_path(folder: Path, first_step: int, rank: int) -> Path:
    """Spans of one rank of one attempt."""
    return attempt_path(folder, first_step) / f"rank-{rank}.jsonl"


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


def drop_later(folder: Path, first_step: int) -> None:
    """Drop what an earlier, longer attempt left of the steps from `first_step` on.

    Raises:
        InputError: a line of the metrics is damaged; it is named.
    """
    _drop_metrics(metrics_path(folder), first_step)
    newest = attempt_path(folder, first_step)
    for attempt in newest.parent.glob("from-step-*"):
        if attempt.name >= newest.name:
            shutil.rmtree(attempt, ignore_errors=True)


def _drop_metrics(path: Path, first_step: int) -> None:
    """Keep the records of steps before `first_step`."""
    if not path.exists():
        return
    kept = [
        json.dumps(record) + "\n"
        for record in read_lines(path, dict)
        if record.get("step", -1) < first_step and record.get("evaluated_after", 0) <= first_step
    ]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.replace(path)  # a full disk or a kill must not cost the records of the whole run
