"""What planning costs, against the global batch and the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from flexcp.planner import make_plan
from flexcp.reproduce.fitting import (
    FITTED_SCHEDULE,
    SCHEDULE_DATA,
    SCHEDULE_MODEL,
    Constants,
    fit_constants,
    schedule_compute_s,
)
from flexcp.reproduce.layouts import POLICY_MODES, batches_of, cluster_of, cost_at
from flexcp.reproduce.published import ScheduleRow
from flexcp.reproduce.result import Column, ExperimentSetup, Result, Table, Value, off
from flexcp.reproduce.workloads import workload

Clock = Callable[[], float]


def run(setup: ExperimentSetup, clock: Clock = time.process_time) -> Result:
    """Predicted seconds of a step, and measured processor milliseconds of its plan."""
    constants = fit_constants(setup.published, setup.steps, setup.seed, setup.progress)
    rows: list[dict[str, Value]] = []
    published = setup.published.schedule
    for number, row in enumerate(published):
        setup.progress("planning table", number, len(published))
        rows.append(_row(row, setup, constants, clock))
    setup.progress("planning table", len(published), len(published))
    fitted = frozenset(
        (number, "paper_s")
        for number, row in enumerate(published)
        if (row.global_batch, row.ranks) in FITTED_SCHEDULE
    )
    return Result("schedule", setup, constants, _tables(tuple(rows), fitted), _NOTES)


def _row(row: ScheduleRow, setup: ExperimentSetup, constants: Constants, clock: Clock) -> dict[str, Value]:
    scale = constants.scales["schedule"]
    paper_s, flexcp_s = (
        constants.fixed_s
        + schedule_compute_s(
            scale, constants.speed, row.global_batch, row.ranks, setup.steps, setup.seed, policy
        )
        for policy in ("paper", "flexcp")
    )
    return {
        "global_batch": row.global_batch,
        "ranks": row.ranks,
        "published_s": row.compute_s,
        "paper_s": paper_s,
        "off": off(paper_s, row.compute_s),
        "flexcp_s": flexcp_s,
        "schedule_ms": row.schedule_ms,
        "solver_ms": row.solver_ms,
        "paper_ms": _planning_ms(row, setup, constants, "paper", clock),
        "flexcp_ms": _planning_ms(row, setup, constants, "flexcp", clock),
    }


def _planning_ms(
    row: ScheduleRow, setup: ExperimentSetup, constants: Constants, policy: str, clock: Clock
) -> float:
    data = workload(SCHEDULE_DATA).scaled(constants.scales["schedule"])
    cluster, cost = cluster_of(row.ranks), cost_at(SCHEDULE_MODEL, constants.speed)
    spent = []
    for batch in batches_of(data, SCHEDULE_MODEL, row.global_batch, setup.steps, setup.seed):
        started = clock()
        make_plan(batch, cluster, cost, policy=policy, mode=POLICY_MODES[policy])
        spent.append(1000 * (clock() - started))
    return median(spent)


def _tables(rows: tuple[dict[str, Value], ...], fitted: frozenset[tuple[int, str]]) -> tuple[Table, ...]:
    what = (Column("global_batch", "global batch", "d"), Column("ranks", "ranks", "d"))
    compute = (
        *what,
        Column("published_s", "published s", ".2f"),
        Column("paper_s", "`paper`, ours s", ".2f"),
        Column("off", "off", "+.1%"),
        Column("flexcp_s", "`flexcp` s", ".2f"),
    )
    planning = (
        *what,
        Column("schedule_ms", "published, all ms", ".0f"),
        Column("solver_ms", "published, solver ms", ".0f"),
        Column("paper_ms", "`paper` here ms", ".1f", measured=True),
        Column("flexcp_ms", "`flexcp` here ms", ".1f", measured=True),
    )
    keys = [{column.key for column in columns} for columns in (compute, planning)]
    halves = [tuple({k: v for k, v in row.items() if k in names} for row in rows) for names in keys]
    return (
        Table(f"Seconds of a step, {SCHEDULE_MODEL}", compute, halves[0], fitted),
        Table("Milliseconds of planning a step", planning, halves[1]),
    )


_NOTES = (
    "The paper does not name the data of this table: the shape of OpenVid is assumed, at its own scale.",
    (
        "Milliseconds here are medians of processor time on this machine, from lengths to a plan, its bound "
        "included. The published `all` also gathers the batch and prepares its tensors, on other processors."
    ),
)
