"""What other policies would have planned for the samples that a run really had, by the model it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flexcp.core.errors import FlexCPError, InputError
from flexcp.core.jsonl import number
from flexcp.core.plan import Plan
from flexcp.core.run_folder import RunInfo
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Link
from flexcp.planner import POLICIES, make_plan
from flexcp.report.page.limits import MOST_RANK_FILES
from flexcp.report.page.spans import Traces
from flexcp.report.page.subject import PolicyRow, Timeline

_SLOW = ("flexsp",)  # solves integer programmes for seconds a step
_MOST_RANKS, _MOST_SAMPLES = MOST_RANK_FILES, 20_000


def compare_policies(
    info: RunInfo, traces: Traces, timelines: Sequence[Timeline]
) -> tuple[tuple[PolicyRow, ...], tuple[str, ...]]:
    """A row for each policy over the steps of the timelines, the run's own last; or why there is none."""
    batches = [_samples(timeline) for timeline in timelines]
    size = sum(map(len, batches))
    if info.cluster.ranks > _MOST_RANKS or size > _MOST_SAMPLES:
        return (), ("Policies are not compared: the run is too large. flexcp plan compares them.",)
    if not traces.whole or not batches:
        return (), ("Policies are not compared: the traces are not complete.",)
    try:
        return _compare(info, batches), ()
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeWarning) as error:
        raise InputError(
            f"the coefficients in run.json cannot be used ({type(error).__name__}: {error})",
            "Copy run.json again; a run that was resumed writes it anew.",
        ) from None


def _compare(info: RunInfo, batches: Sequence[Sequence[Sample]]) -> tuple[PolicyRow, ...]:
    cost = _cost(info)
    names = [name for name in reversed(POLICIES) if name not in (*_SLOW, info.policy)]
    rows = []
    for name in (*names, info.policy):
        try:
            plans = [
                make_plan(
                    batch,
                    info.cluster,
                    cost,
                    policy=name,
                    mode=info.mode,
                    whole_below_tokens=info.whole_below_tokens,
                )
                for batch in batches
            ]
        except FlexCPError as error:
            rows.append(PolicyRow(name, refusal=error.cause))
        else:
            rows.append(_row(name, plans))
    return tuple(rows)


def _cost(info: RunInfo) -> CostModel:
    values = dict(info.coefficients)
    links = {name: Link(**values[name]) for name in ("intra", "inter")}
    for link in links.values():
        number(link.bytes_per_s, "bytes_per_s", 1.0)
        number(link.latency_s, "latency_s", 0.0)
    for name, value in values.items():
        if name not in (*links, "exchange"):
            number(value, name, 0.0)
    return CostModel(**{**values, **links})


def _samples(timeline: Timeline) -> list[Sample]:
    return [
        Sample(number, tokens)
        for box in timeline.panels[0].boxes
        for number, tokens in zip(box.samples, box.tokens, strict=True)
    ]


def _row(name: str, plans: Sequence[Plan]) -> PolicyRow:
    degrees: Counter[int] = Counter()
    for plan in plans:
        degrees.update(plan.degrees)
    total_s = number(sum(plan.step_s for plan in plans), f"the time of {name}", 1e-12)
    return PolicyRow(
        name,
        step_s=total_s / len(plans),
        bound_s=sum(plan.bound_s for plan in plans) / len(plans),
        waves=sum(plan.num_waves for plan in plans) / len(plans),
        degrees=dict(sorted(degrees.items())),
        idle_share=sum(plan.idle_share * plan.step_s for plan in plans) / total_s,
    )
