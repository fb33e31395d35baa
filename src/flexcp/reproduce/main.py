"""The main table: nine rows of seconds and the extreme batch, as published, as `paper`, and as `flexcp`."""

from __future__ import annotations

from flexcp.core.plan import ExchangeKind
from flexcp.reproduce.extreme import MAIN_SHORT, unbalanced
from flexcp.reproduce.extreme import MODEL as EXTREME_MODEL
from flexcp.reproduce.fitting import FITTED_MAIN, GLOBAL_BATCH, Constants, fit_constants
from flexcp.reproduce.layouts import Times, batches_of, cluster_of, cost_at, every_layout
from flexcp.reproduce.published import MainRow
from flexcp.reproduce.result import Column, ExperimentSetup, Result, Table, Value, off
from flexcp.reproduce.workloads import CONTEXT_TOKENS

RANKS = 64
EXCHANGES: dict[str, ExchangeKind] = {"megatron": "ring", "deepspeed": "all-to-all"}


def run(setup: ExperimentSetup) -> Result:
    """All rows."""
    constants = fit_constants(setup.published, setup.steps, setup.seed, setup.progress)
    main = setup.published.main
    times = []
    for number, row in enumerate(main):
        setup.progress("main table", number, len(main) + 1)
        times.append(predict(row, setup, constants))
    setup.progress("main table", len(main), len(main) + 1)
    extreme = unbalanced(MAIN_SHORT, setup, constants)
    setup.progress("main table", len(main) + 1, len(main) + 1)
    rows = _rows(main, times, extreme, setup, constants)
    return Result("main", setup, constants, _tables(rows), _NOTES)


def predict(row: MainRow, setup: ExperimentSetup, constants: Constants) -> Times:
    """Every layout on the same batches."""
    data = constants.workload(row.data)
    return every_layout(
        batches_of(data, row.model, GLOBAL_BATCH, setup.steps, setup.seed),
        cluster_of(RANKS),
        cost_at(row.model, constants.speed),
        exchange=EXCHANGES[row.baseline],
        context_tokens=CONTEXT_TOKENS,
        longest=data.longest_tokens,
        fixed_s=constants.fixed_s,
    )


def _rows(
    main: tuple[MainRow, ...], ours: list[Times], extreme: Times, setup: ExperimentSetup, constants: Constants
) -> tuple[dict[str, Value], ...]:
    rows: list[dict[str, Value]] = [
        {
            "model": row.model,
            "data": row.data,
            "mean_tokens": constants.workload(row.data).mean_tokens(),
            "published_fcp_s": row.fcp_s,
            "fcp_off": off(times.paper, row.fcp_s),
            "baseline": row.baseline,
            "published_baseline_s": row.baseline_s,
            "baseline_off": off(times.padded, row.baseline_s),
            "published_ratio": row.ratio,
            **times.values(),
        }
        for row, times in zip(main, ours, strict=True)
    ]
    last: dict[str, Value] = {
        "model": EXTREME_MODEL,
        "data": f"1×128k + {MAIN_SHORT}×2–8k",
        "baseline": "megatron",
        "published_ratio": setup.published.extreme_ratio,
        **extreme.values(),
    }
    return (*rows, last)


def _tables(rows: tuple[dict[str, Value], ...]) -> tuple[Table, ...]:
    fitted = frozenset(
        (number, "paper_s")
        for number, row in enumerate(rows)
        if FITTED_MAIN.get(str(row["data"])) == row["model"]
    )
    what = (Column("model", "model"), Column("data", "data"))
    fcp = (
        *what,
        Column("mean_tokens", "mean tokens", ",.0f"),
        Column("published_fcp_s", "FCP, published s", ".2f"),
        Column("paper_s", "`paper`, ours s", ".2f"),
        Column("fcp_off", "off", "+.1%"),
    )
    baseline = (
        *what,
        Column("baseline", "baseline"),
        Column("published_baseline_s", "published s", ".2f"),
        Column("padded_s", "padded, ours s", ".2f"),
        Column("baseline_off", "off", "+.1%"),
        Column("published_ratio", "× theirs", ".2f"),
        Column("padded_over_paper", "× ours", ".2f"),
        Column("unattended_over_paper", "× filling not attended", ".2f"),
    )
    flexcp = (
        *what,
        Column("padded_s", "padded s", ".2f"),
        Column("fair_s", "fair static s", ".2f"),
        Column("fair_degree", "its degree", "d"),
        Column("paper_s", "`paper` s", ".2f"),
        Column("flexcp_s", "`flexcp` s", ".2f"),
        Column("padded_over_flexcp", "× padded", ".2f"),
        Column("fair_over_flexcp", "× fair", ".2f"),
        Column("paper_over_flexcp", "× `paper`", ".2f"),
    )
    return (
        Table("FCP: seconds of a step", fcp, rows[:-1], fitted),
        Table("The best static layout of the paper, and its ratio to FCP", baseline, rows),
        Table("The same with policy `flexcp`, and against a fair static layout", flexcp, rows),
    )


_NOTES = (
    (
        "Padded: degree 16 for a context of 131,072, rows filled up to it, the filling attended, as in the "
        "released code. It is the published baseline, not a good one. DeepSpeed exchanges heads (Ulysses), "
        "Megatron runs rings."
    ),
    (
        "Fair static: one degree for all steps that holds the longest sample there can be, no padding, "
        "balanced packs; ranks meet once a step."
    ),
    "`paper` runs in lockstep, as micro-batches do; `flexcp` freely, as its engine does.",
)
