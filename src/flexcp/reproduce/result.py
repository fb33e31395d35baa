"""What an experiment gives: tables of numbers, notes, and the constants behind them; as JSON or Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flexcp.reproduce.fitting import FITTED_ON, Constants, Progress, silent
from flexcp.reproduce.published import PUBLISHED, Published

RESULT_SCHEMA = "flexcp.reproduce/1"
FITTED_MARK = " (fit)"

Value = float | int | str | None


@dataclass(frozen=True, slots=True)
class ExperimentSetup:
    """What every experiment is given.

    Attributes:
        steps: global batches that a number is the mean of.
        seed: which samples are drawn.
        published: the numbers to compare with, and to fit on.
        progress: called with what is being done.
    """

    steps: int = 8
    seed: int = 0
    published: Published = PUBLISHED
    progress: Progress = silent


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        key: name of the value in rows and in JSON.
        title: its heading.
        form: format of a number.
        measured: wall time of this machine, so no two runs agree on it.
    """

    key: str
    title: str
    form: str = ""
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values; `fitted` holds the (row, key) of values that a constant was fitted to meet."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    fitted: frozenset[tuple[int, str]] = frozenset()

    def cell(self, row: int, column: Column) -> str:
        """A value as it is printed.

        >>> table = Table("", (Column("s", "s", ".2f"),), ({"s": 1.0}, {"s": None}), frozenset({(0, "s")}))
        >>> [table.cell(row, table.columns[0]) for row in (0, 1)]
        ['1.00 (fit)', '–']
        """
        value = self.rows[row].get(column.key)
        if value is None:
            return "–"
        text = value if isinstance(value, str) else format(value, column.form)
        return text + (FITTED_MARK if (row, column.key) in self.fitted else "")


@dataclass(frozen=True, slots=True)
class Result:
    """One experiment."""

    experiment: str
    setup: ExperimentSetup
    constants: Constants
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """All values, unrounded."""
        return {
            "schema": RESULT_SCHEMA,
            "experiment": self.experiment,
            "steps": self.setup.steps,
            "seed": self.setup.seed,
            "constants": asdict(self.constants),
            "fitted_on": {name: rows for name, _, rows in FITTED_ON},
            "tables": [
                {
                    "title": table.title,
                    "rows": [dict(row) for row in table.rows],
                    "fitted": sorted([row, key] for row, key in table.fitted),
                    "measured": [column.key for column in table.columns if column.measured],
                }
                for table in self.tables
            ],
            "notes": list(self.notes),
        }

    def as_markdown(self) -> str:
        """Tables and notes for a page."""
        parts = [markdown(table) for table in self.tables]
        return "\n\n".join([*parts, *(f"- {note}" for note in self.notes)])


def markdown(table: Table) -> str:
    """One table; numbers to the right."""
    kinds = {c.key: any(isinstance(row.get(c.key), int | float) for row in table.rows) for c in table.columns}
    lines = [
        f"**{table.title}**",
        "",
        "| " + " | ".join(column.title for column in table.columns) + " |",
        "|" + "|".join("---:" if kinds[column.key] else "---" for column in table.columns) + "|",
    ]
    for row in range(len(table.rows)):
        lines.append("| " + " | ".join(table.cell(row, column) for column in table.columns) + " |")
    return "\n".join(lines)


def constants_table(constants: Constants) -> Table:
    """The fitted constants and the rows that each was fitted on."""
    values = {"speed": constants.speed, "fixed_s": constants.fixed_s, **constants.scales}
    rows: tuple[dict[str, Value], ...] = tuple(
        {"name": name, "value": values[name], "what": what, "on": on} for name, what, on in FITTED_ON
    )
    columns = (
        Column("name", "constant"),
        Column("value", "value", ".4g"),
        Column("what", "what it is"),
        Column("on", "fitted on the published"),
    )
    return Table("Fitted constants; everything else is predicted", columns, rows)


def off(ours: float, published: float) -> float:
    """By how much ours is above the published number.

    >>> off(9.0, 10.0)
    -0.1
    """
    return round(ours / published - 1, 12)
