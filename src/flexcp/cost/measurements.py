"""Measured task times as values, and the tables they are read from; every bad row is named."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from flexcp.core.errors import InputError
from flexcp.cost.model import Load

_Row = TypeVar("_Row")


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

_MOST = 10**15  # of whatever is counted
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9
_PARTS = (  # of a whole
    ("samples", "tokens"),
    ("cut_samples", "samples"),
    ("cut_tokens", "tokens"),
    ("longest_whole_tokens", "tokens"),
)


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


def read_measurements(path: Path, *, encoder: bool = False) -> tuple[Measurement, ...]:
    """Task times from a CSV file with the columns of `COLUMNS`.

    Args:
        path: the file.
        encoder: the model has a vision encoder, whose work counts as pairs: any number of them.

    Raises:
        InputError: no such file, a missing column, or a value that is not one; file and row are named.
    """
    rows = []
    for place, row in _rows(path, ",", COLUMNS):
        counts = [_count(row[name], name, place) for name in _LOAD_COLUMNS]
        rows.append(Measurement(Load(*counts), _count(row["degree"], "degree", place), _seconds(row, place)))
        load = rows[-1].load
        if not encoder and load.pairs > load.tokens**2:
            raise InputError(
                f"{place}: {load.pairs} pairs are more than {load.tokens} tokens have",
                "At most every token attends to every other: tokens times tokens.",
            )
    check_measurements(rows, str(path))
    return tuple(rows)


def require_columns(path: Path) -> None:
    """Refuse a table that is not one of task times, as far as its first line tells.

    Raises:
        InputError: no such file, or no such columns; they are named.
    """
    _reader(path, ",", COLUMNS)


def check_measurements(rows: Sequence[Measurement], source: str = "measurements") -> None:
    """Refuse times and counts that cannot be those of real tasks.

    Raises:
        InputError: names the row, the first one being row 1.
    """
    for number, row in enumerate(rows, 1):
        place, load = f"{source}, row {number}", row.load
        check_seconds(row.seconds, place)
        if row.degree < 1 or load.tokens < 1 or load.samples < 1 or load.pairs < load.tokens:
            raise InputError(
                f"{place}: degree {row.degree}, {load.samples} samples, {load.tokens} tokens and "
                f"{load.pairs} pairs cannot be a task",
                "Degree, samples and tokens are at least 1, and every token attends at least to itself.",
            )
        for part, whole in _PARTS:
            some, of = getattr(load, part), getattr(load, whole)
            if some > of:
                raise InputError(
                    f"{place}: {part} is {some}, and {whole} {of}", f"{part} is at most {whole}."
                )


def check_seconds(seconds: float, place: str) -> None:
    """Refuse a time that cannot be one.

    Raises:
        InputError: it is not finite and positive, or beyond all reason; the place is named.
    """
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise InputError(
            f"{place}: a time of {seconds} s",
            f"Measured times are finite, from {_SHORTEST_S:g} to {_LONGEST_S:g} s.",
        )


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
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list) or not values or not all(map(_is_length, values)):
        raise InputError(f"{place}: batch is {text[:40]!r}", "It is a list of lengths, such as [510, 2].")
    return tuple(values)


def _is_length(value: object) -> bool:
    return type(value) is int and 0 < value <= _MOST


def _rows(path: Path, delimiter: str, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Place and values of every row; at least one."""
    reader = _reader(path, delimiter, columns)
    number = 0
    while (row := _next(reader, f"{path}, row {number + 1}")) is not None:
        number += 1
        place = f"{path}, row {number}"
        absent = [name for name in columns if row[name] is None]
        if absent:
            raise InputError(f"{place}: {absent[0]} is missing", "The file may have been cut off.")
        yield place, row
    if not number:
        raise InputError(f"{path} holds no measurement", "Give at least a few of different sizes.")


def _reader(path: Path, delimiter: str, columns: Sequence[str]) -> csv.DictReader[str]:
    """At the first row of a table that has these columns."""
    lines = _lines(path)
    header = _next(csv.reader(lines[:1], delimiter=delimiter, skipinitialspace=True), f"{path}, line 1,")
    found = [name.strip() for name in header or ()]
    missing = [name for name in columns if name not in found]
    if missing:
        other = f" Attention times: {'|'.join(PACK_COLUMNS)} or {','.join(DOCUMENT_COLUMNS)}."
        raise InputError(
            f"{path} has no column {', '.join(map(repr, missing))}",
            f"Its first line names them: {', '.join(columns)}.{other if columns is COLUMNS else ''}",
        )
    return csv.DictReader(lines[1:], found, delimiter=delimiter, skipinitialspace=True)


def _next(reader: Iterator[_Row], place: str) -> _Row | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        raise InputError(f"{place} cannot be read: {error}", "A value is far too long, or no text.") from None


def _lines(path: Path) -> list[str]:
    """Of a file, at least one."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", "Give a table of measurements.") from error


def _seconds(row: dict[str, str], place: str) -> float:
    return _number(row["seconds"], "seconds", place)


def _number(text: str, name: str, place: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{place}: {name} is {text[:40]!r}", "It must be a number.") from None


def _count(text: str, name: str, place: str) -> int:
    # Digits are counted first: Python refuses to read some thousands of them.
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > len(str(_MOST)) or int(digits) > _MOST:
        raise InputError(f"{place}: {name} is {text[:40]!r}", f"It must be a whole number, 0 to {_MOST:g}.")
    return int(digits)


def _positive(text: str, name: str, place: str) -> int:
    value = _count(text, name, place)
    if value < 1:
        raise InputError(f"{place}: {name} is {value}", "It is at least 1.")
    return value
