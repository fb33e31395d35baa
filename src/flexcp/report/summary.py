"""A run on the terminal: one line a step, and at its end what it came to and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table

from flexcp.core.metrics import StepReport
from flexcp.report.advice import Figures
from flexcp.report.tables import format_degrees, format_seconds

STEP_HEADER = (
    f"{'step':>4} {'loss':>7} {'tok/s':>7}  {'degree×groups':<17}{'predicted':>9}{'measured':>9}"
    f" {'gap':>5} {'idle':>4} {'MFU':>4} {'wait':>6}"
)

_BAR = 24  # columns
_MOST_RANKS = 8  # listed one by one


def step_line(report: StepReport) -> str:
    """One step in 80 columns, under `STEP_HEADER`."""
    return (
        f"{report.step:>4} {_loss(report):>7} {report.tokens_per_s:>7,.0f}  "
        f"{format_degrees(report.degrees):<17} {report.predicted_s:>7.2f}s {report.measured_s:>7.2f}s"
        f" {report.gap:>5.3f} {report.idle_share:>4.0%} {format_share(report.mfu):>4}"
        f" {report.exposed_s * 1e3:>4.0f}ms"
    )


def summary(
    reports: Sequence[StepReport],
    eval_losses: Mapping[int, float],
    figures: Figures,
    learnt: Mapping[str, float],
) -> Group:
    """The tables at the end of a run.

    Args:
        reports: of at least one step.
        eval_losses: by the number of steps done.
        figures: of the same steps.
        learnt: factors on terms of the cost model, by their names.
    """
    return Group(
        _run_table(reports, eval_losses, figures, learnt), _where_time_went(figures, len(reports) > 1)
    )


def _run_table(
    reports: Sequence[StepReport],
    eval_losses: Mapping[int, float],
    figures: Figures,
    learnt: Mapping[str, float],
) -> Table:
    table = Table(title="Run", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    degrees: Counter[int] = Counter()
    for report in reports:
        degrees.update(report.degrees)
    table.add_row("steps", str(len(reports)))
    trained = [report for report in reports if not report.skipped]
    if trained:
        table.add_row("loss, first → last", f"{_loss(trained[0])} → {_loss(trained[-1])}")
    if len(trained) < len(reports):
        table.add_row("skipped, loss or gradient not finite", str(len(reports) - len(trained)))
    for done, loss in eval_losses.items():
        table.add_row(f"evaluation loss after {done}", f"{loss:.4f}")
    table.add_row("degree×groups", format_degrees(degrees))
    for name, factor in learnt.items():
        table.add_row(f"learnt: {name}", f"× {factor:.2f}")
    # The first step has nothing to hide its plan and data behind.
    table.add_row("waited for the first plan and data", f"{reports[0].exposed_s:.2f} s")
    if len(reports) > 1:
        table.add_section()
        table.add_row("after the first step", "")
    table.add_row("tokens/s", f"{figures.tokens_per_s:,.0f}")
    table.add_row("MFU", format_share(figures.mfu, 1))
    times = f"{format_seconds(figures.predicted_s)} / {format_seconds(figures.measured_s)}"
    table.add_row("tasks of a step, predicted / measured", times)
    table.add_row("gap to the bound", f"{figures.gap:.3f}")
    table.add_row("planning, mean", f"{1e3 * figures.plan_s:.0f} ms")
    return table


def _where_time_went(figures: Figures, later: bool) -> Table:
    table = Table(title="Where the time went" + (", after the first step" if later else ""))
    table.add_column("part", style="bold")
    table.add_column("a step", justify="right")
    table.add_column("share", justify="right")
    table.add_column("predicted", justify="right")
    table.add_column("", width=_BAR)
    busy_s = figures.predicted_s * (1 - figures.predicted_idle)
    predicted = {"compute": busy_s, "idle": figures.predicted_s - busy_s}
    for name, share in figures.parts.items():
        table.add_row(
            name,
            format_seconds(share * figures.step_s),
            f"{share:.1%}",
            format_seconds(predicted[name]) if name in predicted else "",
            "█" * round(share * _BAR),
        )
    table.caption = f"compute as predicted holds ring waits\n{idle_by_rank(figures.idle_shares)}"
    return table


def idle_by_rank(shares: Sequence[float]) -> str:
    """Idle share of every rank, or of the extremes where there are many.

    >>> idle_by_rank((0.02, 0.25))
    'idle by rank: 0: 2%, 1: 25%'
    >>> idle_by_rank((0.5,) * 30 + (0.1, 0.6))
    'idle by rank: least 10% (rank 30), median 50%, most 60% (rank 31)'
    """
    if len(shares) <= _MOST_RANKS:
        return "idle by rank: " + (", ".join(f"{r}: {share:.0%}" for r, share in enumerate(shares)) or "–")
    order = sorted(range(len(shares)), key=lambda rank: shares[rank])
    least, middle, most = order[0], order[len(order) // 2], order[-1]
    return (
        f"idle by rank: least {shares[least]:.0%} (rank {least}), median {shares[middle]:.0%}, "
        f"most {shares[most]:.0%} (rank {most})"
    )


def format_share(share: float | None, digits: int = 0) -> str:
    """Per cent; a dash where it is not known.

    >>> format_share(0.413), format_share(0.413, 1), format_share(None)
    ('41%', '41.3%', '–')
    """
    return "–" if share is None else f"{share:.{digits}%}"


def _loss(report: StepReport) -> str:
    return "–" if report.loss is None else f"{report.loss:.4f}"
