"""From the JSON of `flexcp plan --out` to what a page shows of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.jsonl import number, parse_json, whole
from flexcp.core.layout import make_layout
from flexcp.core.plan import Plan
from flexcp.core.trace import pack_of
from flexcp.planner.outcome import Outcome
from flexcp.report.page.limits import MOST_ROWS, MOST_STEPS
from flexcp.report.page.subject import (
    Box,
    Curve,
    DegreeShare,
    LengthCounter,
    Lengths,
    Panel,
    Subject,
    Timeline,
    TokensHeld,
    choose_steps,
    no_such_step,
    plan_of,
)
from flexcp.report.scales import shown_ranks
from flexcp.report.tables import format_seconds

PLAN_REPORT_SCHEMA = "flexcp.plan-report/2"
_REMEDY = "Write it with: flexcp plan … --out plan.json"


def read_plan_report(path: Path) -> dict[str, Any]:
    """Read what `flexcp plan --out plan.json` wrote.

    Raises:
        InputError: not JSON, another schema, without tasks, or no policy has a plan.
    """
    try:
        body = parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not whole JSON ({type(error).__name__}: {error})", _REMEDY) from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})", _REMEDY) from None
    schema = body.get("schema") if isinstance(body, dict) else None
    if not isinstance(body, dict) or schema != PLAN_REPORT_SCHEMA:
        said = f"has the schema {schema!r}" if schema else "has no schema"
        raise InputError(f"{path} {said}; a page is made of {PLAN_REPORT_SCHEMA!r}", _REMEDY)
    try:
        _check_plans(body, path)
    except (LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None
    return body


def _check_plans(body: Mapping[str, Any], path: Path) -> None:
    if not _served(body):
        refusals = "; ".join(str(policy["refusal"]) for policy in body["policies"].values())
        raise InputError(f"{path} holds no plan: {refusals}", "Plan again with what the reason asks for.")
    if not all("tasks" in step for step in _main_policy(body)[1]["steps"]):
        raise InputError(f"{path} has no tasks: it is what --json prints", _REMEDY)


def subject_of_plan(path: Path, step: int | None = None) -> Subject:
    """Everything to show of a plan report; `step` is to have a timeline.

    Raises:
        InputError: see `read_plan_report`; a part is missing or misshapen, or there is no such step.
    """
    body = read_plan_report(path)
    steps = range(len(_main_policy(body)[1]["steps"]))
    if step is not None and step not in steps:
        raise no_such_step(step, steps)
    try:
        return _subject(body, path.name, step)
    except (LookupError, TypeError, ValueError, AttributeError, InputError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is damaged ({type(error).__name__}: {str(error).splitlines()[0]})",
        "Write it again with: flexcp plan … --out plan.json",
    )


def _served(body: Mapping[str, Any]) -> dict[str, Any]:
    policies = body.get("policies")
    if not isinstance(policies, dict):
        return {}
    return {name: one for name, one in policies.items() if isinstance(one, dict) and one.get("steps")}


def _main_policy(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The last of the table is what the verdict is about."""
    served = _served(body)
    name = list(served)[-1]
    return name, served[name]


def _subject(body: Mapping[str, Any], file_name: str, step: int | None) -> Subject:
    given, served = body["inputs"], _served(body)
    name, policy = _main_policy(body)
    baseline = body["baseline"] if body["baseline"] in served else ""
    compared = [name, *([baseline] if baseline and baseline != name else [])]
    steps = policy["steps"]
    chosen = choose_steps([_seconds(one, "step_s") for one in steps], MOST_STEPS, step)
    timelines = [_timeline(given, served, compared, index) for index in chosen]
    main = [timeline.plans[0] for timeline in timelines]
    curves, gaps = _curves(served, compared)
    return Subject(
        title=file_name,
        subtitle=f"{given['model']} on {given['ranks']:,} × {given['hardware']}",
        origin="planned",
        verdict=str(body["verdict"]),
        advice=(),
        good=not str(body["verdict"]).startswith("Not worth"),
        facts=_facts(given, policy, served.get(baseline)),
        notices=tuple(_notices(given, chosen, len(steps))),
        steps=tuple(range(len(steps))),
        focus=chosen[0] if step is None else step,
        curves=curves,
        gaps=gaps,
        timelines=tuple(timelines),
        lengths=_lengths(main),
        degrees=_degrees(main, policy["degrees"]),
        memory=_held(main),
        policies=_policies(body["policies"]),
        baseline=baseline,
        policy=name,
    )


def _timeline(
    given: Mapping[str, Any], served: Mapping[str, Any], compared: Sequence[str], index: int
) -> Timeline:
    """One step by all that are compared and told their tasks."""
    cluster = Cluster(
        whole(given["ranks"], "ranks", 1),
        whole(given["tokens_per_rank"], "tokens_per_rank", 1),
        whole(given["ranks_per_node"], "ranks_per_node", 1),
    )
    steps = [(name, served[name]["steps"][index]) for name in compared]
    told = [(name, step) for name, step in steps if "tasks" in step]
    panels = [Panel(name, tuple(map(_box, count(), step["tasks"]))) for name, step in told]
    bounds_s = [_seconds(step, "bound_s") for _, step in told]
    plans = [
        plan_of(
            panel,
            bound_s,
            mode=given["mode"],
            cluster=cluster,
            whole_below_tokens=given["whole_below_tokens"],
        )
        for panel, bound_s in zip(panels, bounds_s, strict=True)
    ]
    return Timeline(index, tuple(panels), bounds_s[0], cluster, tuple(plans))


def _box(key: int, task: Mapping[str, Any]) -> Box:
    ranks = tuple(whole(rank, "a rank") for rank in task["ranks"])
    if not ranks:
        raise ValueError("a task has no ranks")
    start_s, end_s = number(task["start_s"], "start_s", 0.0), number(task["end_s"], "end_s")
    if not start_s < end_s:
        raise ValueError(f"a task goes from {start_s} s to {end_s} s")
    return Box(key, len(ranks), ranks, pack_of(task), start_s, end_s, int(task["wave"]))


def _notices(given: Mapping[str, Any], chosen: Sequence[int], steps: int) -> list[str]:
    notices = [str(notice) for notice in given["notices"]]
    rows = shown_ranks(given["ranks"], MOST_ROWS)
    if len(rows) < given["ranks"]:
        notices.append(f"Timelines show every {rows[1] - rows[0]}th of {given['ranks']:,} ranks.")
    if len(chosen) < steps:
        notices.append(
            f"Timelines, lengths and memory are of {len(chosen)} of {steps:,} steps: "
            f"{', '.join(map(str, chosen))}."
        )
    return notices


def _curves(
    served: Mapping[str, Any], compared: Sequence[str]
) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    """Seconds a step with the bound, and their ratio to it."""
    curves, gaps = [], []
    for name, style in zip(compared, ("main", "other"), strict=False):
        steps = served[name]["steps"]
        curves.append(Curve(name, tuple(_seconds(step, "step_s") for step in steps), style))
        gaps.append(Curve(name, tuple(number(step["gap"], "gap", 0.0) for step in steps), style))
    bounds_s = tuple(_seconds(step, "bound_s") for step in served[compared[0]]["steps"])
    return (*curves, Curve("bound", bounds_s, "bound")), tuple(gaps)


def _seconds(values: Mapping[str, Any], name: str) -> float:
    """A time that others are divided by."""
    return number(values[name], name, 1e-12)


def _facts(
    given: Mapping[str, Any], policy: Mapping[str, Any], baseline: Mapping[str, Any] | None
) -> tuple[tuple[str, str], ...]:
    facts = [
        ("step", format_seconds(policy["step_s"])),
        ("above the bound", f"{policy['gap'] - 1:.1%}"),
        ("idle", f"{policy['idle_share']:.1%}"),
        ("messages not hidden", f"{policy['communication_share']:.1%}"),
        ("planned in", f"{policy['plan_ms']:.0f} ms"),
    ]
    if baseline is not None:
        facts.insert(1, ("against the baseline", f"{baseline['step_s'] / policy['step_s']:.2f}×"))
    return (
        *facts,
        ("model", str(given["model"])),
        ("hardware", f"{given['ranks']:,} × {given['hardware']}"),
        ("ranks a node", f"{given['ranks_per_node']}"),
        ("tokens a rank", f"{given['tokens_per_rank']:,}"),
        ("global batch", f"{given['global_batch']:,} samples"),
        ("mode", str(given["mode"])),
        ("lengths from", ", ".join(map(str, given["lengths"]))),
        ("seed", str(given["seed"])),
    )


def _lengths(plans: Sequence[Plan]) -> Lengths:
    counter = LengthCounter()
    for plan in plans:
        counter.add(sample.tokens for sample in plan.samples)
    return counter.counted()


def _degrees(plans: Sequence[Plan], tasks: Mapping[str, int]) -> tuple[DegreeShare, ...]:
    rank_s: Counter[int] = Counter()
    for plan in plans:
        for task in plan.tasks:
            rank_s[task.degree] += task.duration_s * task.degree  # type: ignore[assignment]
    counts = {int(degree): int(count) for degree, count in tasks.items()}
    return tuple(DegreeShare(d, counts[d], float(rank_s[d])) for d in sorted(counts))


def _held(plans: Sequence[Plan]) -> TokensHeld:
    """Ranks run one task at a time, so the most they hold is their fullest task."""
    cluster = plans[0].cluster
    peaks = [0] * cluster.ranks
    for plan in plans:
        for task in plan.tasks:
            layout = make_layout(plan.pack(task), task.degree, plan.whole_below_tokens)
            for member, rank in enumerate(task.ranks):
                peaks[rank] = max(peaks[rank], layout.rows(member))
    return TokensHeld(tuple(range(cluster.ranks)), tuple(peaks), cluster.tokens_per_rank)


def _policies(policies: Mapping[str, Any]) -> tuple[Outcome, ...]:
    rows = []
    for name, policy in policies.items():
        if "refusal" in policy:
            rows.append(Outcome(name, refusal=str(policy["refusal"]) or "no reason given"))
            continue
        rows.append(
            Outcome(
                name,
                step_s=_seconds(policy, "step_s"),
                bound_s=_seconds(policy, "bound_s"),
                waves=number(policy["waves"], "waves", 0.0),
                degrees={int(degree): int(tasks) for degree, tasks in policy["degrees"].items()},
                idle_share=number(policy["idle_share"], "idle_share", -1.0),
                communication_share=number(policy["communication_share"], "communication_share", -1.0),
            )
        )
    return tuple(rows)
