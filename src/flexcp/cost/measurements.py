"""Measured task times as values, and the tables they are read from; every bad row is named."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from flexcp.core.errors import InputError
from flexcp.cost.model import Load


@dataclass(frozen=True, slots=True)
class Measurement:
    """One task that really ran.

    Attributes:
        load: what the pack held.
        degree: ranks of its group.
        seconds: forward and backward, in the clock of the calibration it is for.
    """

    load: Load
    degree: int
    seconds: float

    def __str__(self) -> str:
        samples = f"{self.load.samples} sample" + "s" * (self.load.samples != 1)
        return f"{samples}, {self.load.tokens} tokens, degree {self.degree}, {self.seconds:.4g} s"


_LOAD_COLUMNS = tuple(field.name for field in fields(Load))
COLUMNS = (*_LOAD_COLUMNS, "degree", "seconds")
PACK_COLUMNS = ("tp", "cp", "real_attn_time_ms", "batch")
DOCUMENT_COLUMNS = ("tp", "cp", "duration_per_doc", "L")


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """A measured attention time of one pack; heads split over `tp` ranks, rows over `cp`.

    Attributes:
        lengths: tokens of the documents of the pack.
        seconds: of one layer, as the source measured it.
    """

    lengths: tuple[int, ...]
    tp: int
    cp: int
    seconds: float


def read_measurements(path: Path) -> tuple[Measurement, ...]:
    """Task times from a CSV file with the columns of `COLUMNS`.

    Raises:
        InputError: no such file, a missing column, or a value that is not one; file and row are named.
    """
    rows = []
    for place, row in _rows(path, ",", COLUMNS):
        counts = [_count(row[name], name, place) for name in _LOAD_COLUMNS]
        rows.append(Measurement(Load(*counts), _count(row["degree"], "degree", place), _seconds(row, place)))
    check_measurements(rows, str(path))
    return tuple(rows)


def check_measurements(rows: Sequence[Measurement], source: str = "measurements") -> None:
    """Whether times and counts can be those of real tasks.

    Raises:
        InputError: names the row, the first one being row 1.
    """
    for number, row in enumerate(rows, 1):
        place = f"{source}, row {number}"
        check_seconds(row.seconds, place)
        if row.degree < 1 or row.load.tokens < 1 or row.load.samples < 1 or row.load.pairs < row.load.tokens:
            raise InputError(
                f"{place}: degree {row.degree}, {row.load.samples} samples, {row.load.tokens} tokens and "
                f"{row.load.pairs} pairs cannot be a task",
                "Degree, samples and tokens are at least 1, and every token attends at least to itself.",
            )


def check_seconds(seconds: float, place: str) -> None:
    """Whether a time can be one.

    Raises:
        InputError: it is not finite and positive; the place is named.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(f"{place}: a time of {seconds} s", "Measured times are finite and above 0.")


def read_attention_times(path: Path) -> tuple[AttentionTime, ...]:
    """Attention times in the tables of hao-ai-lab/DistCA; the first line tells which.

    Packs: `tp|cp|real_attn_time_ms|batch`, lengths as a JSON list. Single documents:
    `L,cp,tp,duration_per_doc` in ms. Other columns may be there.

    Raises:
        InputError: no such file, a missing column, or a value that is not one; file and row are named.
    """
    packs = "|" in _lines(path)[0]
    columns = PACK_COLUMNS if packs else DOCUMENT_COLUMNS
    rows = []
    for place, row in _rows(path, "|" if packs else ",", columns):
        seconds = _number(row[columns[2]], columns[2], place) / 1e3
        check_seconds(seconds, place)
        tp, cp = (_positive(row[name], name, place) for name in ("tp", "cp"))
        lengths = _lengths(row["batch"], place) if packs else (_positive(row["L"], "L", place),)
        rows.append(AttentionTime(lengths, tp, cp, seconds))
    return tuple(rows)


def is_attention_table(path: Path) -> bool:
    """Whether the first line of a table names the columns of `read_attention_times`.

    Raises:
        InputError: no such file.
    """
    header = {name.strip() for name in _lines(path)[0].replace("|", ",").split(",")}
    return header >= set(PACK_COLUMNS) or header >= set(DOCUMENT_COLUMNS)


def _lengths(text: str, place: str) -> tuple[int, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, list) or not values or not all(type(v) is int and v > 0 for v in values):
        raise InputError(f"{place}: batch is {text[:40]!r}", "It is a list of lengths, such as [510, 2].")
    return tuple(values)


def _rows(path: Path, delimiter: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Place and values of every row; at least one."""
    reader = csv.DictReader(_lines(path), delimiter=delimiter)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"{path} has no column {missing[0]!r}", f"Its first line names them: {', '.join(columns)}."
        )
    number = 0
    for number, row in enumerate(reader, 1):
        place = f"{path}, row {number}"
        absent = [name for name in columns if row[name] is None]
        if absent:
            raise InputError(f"{place}: {absent[0]} is missing", "The file may have been cut off.")
        yield place, row
    if not number:
        raise InputError(f"{path} holds no measurement", "Give at least a few of different sizes.")


def _lines(path: Path) -> list[str]:
    """Of a file, at least one."""
    try:
        return path.read_text(encoding="utf-8").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", "Give a table of measurements.") from error


def _seconds(row: dict[str, str], place: str) -> float:
    return _number(row["seconds"], "seconds", place)


def _number(text: str, name: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{place}: {name} is {text!r}", "It must be a number.") from None


def _count(text: str, name: str, place: str) -> int:
    if not text.strip().isdecimal():
        raise InputError(f"{place}: {name} is {text!r}", "It must be a whole number, 0 or more.")
    return int(text)


def _positive(text: str, name: str, place: str) -> int:
    value = _count(text, name, place)
    if value < 1:
        raise InputError(f"{place}: {name} is {value}", "It is at least 1.")
    return value
