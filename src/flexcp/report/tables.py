"""Rich tables of one plan and of several policies side by side; builds them and prints nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from flexcp.core.sample import Sample
from flexcp.planner.outcome import Outcome
from flexcp.report.explain import Choice


def format_degrees(degrees: Mapping[int, int], most: int | None = None) -> str:
    """Degree×count, ascending; beyond `most` entries the middle is left out, the widest stay.

    >>> format_degrees({2: 1, 1: 3, 9: 1})
    '1×3 2×1 9×1'
    >>> format_degrees({1: 9, 2: 4, 3: 2, 5: 1, 9: 1}, most=3)
    '1×9 … 5×1 9×1'
    """
    parts = [f"{degree}×{degrees[degree]}" for degree in sorted(degrees)]
    if most is not None and len(parts) > most:
        tail = most // 2 + 1
        parts = [*parts[: most - tail], "…", *parts[len(parts) - tail :]]
    return " ".join(parts)


def format_seconds(seconds: float) -> str:
    """Three significant digits in the unit that suits.

    >>> format_seconds(3.2149), format_seconds(0.0421), format_seconds(0.00000731), format_seconds(187.2)
    ('3.21 s', '42.1 ms', '7.31 µs', '187 s')
    >>> format_seconds(2.7e-7), format_seconds(4e-12), format_seconds(0.0)
    ('270 ns', '4.00 ps', '0 s')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-12)} ps" if seconds else "0 s"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def format_count(value: float) -> str:
    """A mean of whole numbers: no decimals where it is whole.

    >>> format_count(9.0), format_count(9.5)
    ('9', '9.5')
    """
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


_MOST_NAMED = 64  # ranks of a group that are named one by one
_HEADS = ("policy", "step", "gap", "speed", "waves", "degrees", "idle", "comm", "plan")


def policy_table(outcomes: Sequence[Outcome], baseline: Outcome | None, width: int = 80) -> Text:
    """One line a policy, as wide as its content; the reason of one that cannot serve fills its line.

    Speed is the baseline's step time over the row's.
    """
    rows = [_HEADS, *(_cells(outcome, baseline) for outcome in outcomes if not outcome.refusal)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    widths[0] = max(len("policy"), *(len(outcome.policy) for outcome in outcomes))
    text = Text()
    text.append(_line(_HEADS, widths) + "\n", "bold")
    text.append("─" * (sum(widths) + 2 * len(widths) - 2), "dim")
    for outcome in outcomes:
        text.append("\n")
        if not outcome.refusal:
            last = outcome is outcomes[-1]
            text.append(_line(_cells(outcome, baseline), widths), "bold" if last else "")
        else:
            indent = " " * (widths[0] + 2)
            lines = textwrap.wrap(outcome.refusal, max(20, width - len(indent)))
            text.append(outcome.policy.ljust(widths[0] + 2), "dim")
            text.append(f"\n{indent}".join(lines), "yellow")
    return text


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)])


def _cells(outcome: Outcome, baseline: Outcome | None) -> tuple[str, ...]:
    return (
        outcome.policy,
        format_seconds(outcome.step_s),
        f"{outcome.gap:.3f}",
        f"{baseline.step_s / outcome.step_s:.2f}×" if baseline else "–",
        format_count(outcome.waves),
        format_range(outcome.degrees),
        f"{outcome.idle_share:.1%}",
        f"{outcome.communication_share:.1%}",
        f"{outcome.plan_ms:.0f} ms",
    )


def format_range(degrees: Mapping[int, int]) -> str:
    """Least and most degree.

    >>> format_range({8: 4}), format_range({1: 9, 3: 2, 17: 1})
    ('8', '1–17')
    """
    least, most = min(degrees), max(degrees)
    return f"{least}" if least == most else f"{least}–{most}"


def choice_table(choices: Sequence[Choice]) -> Table:
    """Why each long sample got its degree, and what one rank less or more would change."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for name in ("sample", "tokens", "degree", "time", "one less", "one more"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("because", overflow="fold")
    for choice in choices:
        table.add_row(
            str(choice.sample),
            f"{choice.tokens:,}",
            str(choice.degree),
            format_seconds(choice.seconds),
            _change(choice.seconds, choice.less_s),
            _change(choice.seconds, choice.more_s),
            choice.reason,
        )
    return table


def _change(seconds: float, other_s: float | None) -> str:
    if other_s is None:
        return "–"
    return ("+" if other_s >= seconds else "-") + format_seconds(abs(other_s - seconds))


def task_words(
    pack: Sequence[Sample], degree: int, ranks: Sequence[int], start_s: float, end_s: float
) -> str:
    """What a drawing says of one task; `ranks` may be fewer than its degree where not all are known.

    >>> print(task_words([Sample(7, 900), Sample(9, 80)], 2, (4, 5), 0.25, 0.75))
    2 samples, 980 tokens, longest 900
    degree 2: ranks 4–5
    500 ms, from 0.250 s to 0.750 s
    """
    tokens = [sample.tokens for sample in pack]
    what = f"{len(pack)} samples" if len(pack) > 1 else f"sample {pack[0].id}"
    longest = f", longest {max(tokens):,}" if len(pack) > 1 else ""
    where = format_ranks(ranks) if len(ranks) <= _MOST_NAMED else f"{min(ranks)} … {max(ranks)}"
    known = f"ranks {where}" if len(ranks) == degree else f"among them {where}"
    return (
        f"{what}, {sum(tokens):,} tokens{longest}\n"
        f"degree {degree}: {known}\n"
        f"{format_seconds(end_s - start_s)}, from {start_s:.3f} s to {end_s:.3f} s"
    )


def rank_runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs of neighbouring ranks as inclusive pairs, whatever the ring order.

    >>> rank_runs((4, 5, 9, 3))
    [(3, 5), (9, 9)]
    """
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def format_ranks(ranks: Sequence[int]) -> str:
    """Ranks of a group, runs shortened.

    >>> format_ranks((0, 1, 2, 5))
    '0–2, 5'
    """
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in rank_runs(ranks))
