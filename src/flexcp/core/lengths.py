"""Length files in and out: JSON, JSON lines, CSV/TSV/PSV, plain text, Megatron `.idx`.

Reads lengths that somebody already counted; counting the tokens of documents is `flexcp.train.data`.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import LengthsError
from flexcp.core.megatron_index import is_megatron_index, read_megatron_index
from flexcp.core.nearest import near_path
from flexcp.core.sample import Sample

Lengths = npt.NDArray[np.int64]

WRITTEN = (".json", ".csv", ".txt")
# Taken in this order when the caller names no column.
USUAL_COLUMNS = ("tokens", "length", "num_tokens", "seqlen")

_DELIMITERS = {".csv": ",", ".tsv": "\t", ".psv": "|"}
_WHOLE = "Lengths are whole numbers of tokens, at least 1."


@dataclass(frozen=True, slots=True)
class _Entries:
    """Raw values of a file, where each one stands (for errors), and spans by position."""

    values: Sequence[object]
    where: Callable[[int], str]
    spans: dict[int, object] = field(default_factory=dict)


def read_lengths(path: str | Path, column: str | None = None) -> Lengths:
    """Read the lengths of a file, in its order.

    The suffix decides the form (.json, .jsonl, .csv, .tsv, .psv, .idx); any other name is told by its
    content, down to plain text with one number a line.

    Args:
        path: the file.
        column: which column (CSV) or key (JSON objects) holds the lengths. Without it: `tokens`, `length`,
            `num_tokens` or `seqlen`, or the only column there is.

    Returns:
        int64 [samples], tokens per sample, all at least 1, at least one sample.

    Raises:
        LengthsError: names the file and the line or entry that is not a length.
    """
    path = Path(path)
    data = _read(path)
    if is_megatron_index(path, data):
        lengths = read_megatron_index(path, data)
        _refuse_below_one(path, lengths, _entry)
        return lengths
    return _to_array(path, _parse(path, data, column))


def read_samples(path: str | Path, column: str | None = None) -> tuple[Sample, ...]:
    """Read a length file as samples numbered from 0, with spans where JSON entries give them.

    A JSON entry may be `{"tokens": 9, "spans": [[2, 6]]}`: rows 2..5 attend to each other both ways.

    Raises:
        LengthsError: as `read_lengths`; also for spans that are not inside their sample.
    """
    path = Path(path)
    data = _read(path)
    if is_megatron_index(path, data):
        entries = _Entries(read_megatron_index(path, data).tolist(), _entry)
    else:
        entries = _parse(path, data, column)
    lengths = _to_array(path, entries).tolist()
    if not entries.spans:
        return tuple(map(Sample, range(len(lengths)), lengths))
    return tuple(_make_sample(path, entries, index, tokens) for index, tokens in enumerate(lengths))


def require_suffix(path: Path) -> None:
    """Refuse a name of a file whose form `write_lengths` does not know.

    Raises:
        LengthsError: it does not.
    """
    if path.suffix not in WRITTEN:
        raise LengthsError(f"{path}: no length file ends in {path.suffix!r}", "Name it .json, .csv or .txt.")


def write_lengths(path: str | Path, lengths: Sequence[int] | Lengths) -> None:
    """Write lengths as a JSON list (.json), a column `tokens` (.csv) or one number a line (.txt).

    The file appears whole or not at all. `read_lengths` gives back the same array.

    Raises:
        LengthsError: another suffix, or an entry that is not a length.
    """
    path = Path(path)
    require_suffix(path)
    values = lengths.tolist() if isinstance(lengths, np.ndarray) else list(lengths)
    values = _to_array(path, _Entries(values, _entry)).tolist()
    lines = "\n".join(map(str, values)) + "\n"
    match path.suffix:
        case ".json":
            text = json.dumps(values) + "\n"
        case ".csv":
            text = f"{USUAL_COLUMNS[0]}\n{lines}"
        case _:
            text = lines
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise LengthsError(f"{path} cannot be written ({error.strerror})", "Choose another place.") from None
    finally:
        aside.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------- forms


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise LengthsError(
            f"{path} is a folder, not a length file",
            f"Count the tokens of its documents first: flexcp lengths {path} --out lengths.json",
        ) from None
    except FileNotFoundError:
        raise LengthsError(f"{path} does not exist", near_path(path)) from None
    except OSError as error:
        raise LengthsError(f"{path} cannot be read ({error.strerror})", "Check its permissions.") from None
    if not data.strip():
        raise LengthsError(f"{path} is empty", "Give at least one length.")
    return data


def _parse(path: Path, data: bytes, column: str | None) -> _Entries:
    text = _decode(path, data)
    head = text.lstrip()[:1]
    first_line = text.lstrip().split("\n", 1)[0]
    if path.suffix in _DELIMITERS:
        return _read_table(path, text, _DELIMITERS[path.suffix], column)
    if path.suffix in (".jsonl", ".ndjson") or (path.suffix != ".json" and head == "{"):
        return _read_json_lines(path, text, column)
    if path.suffix == ".json" or head == "[":
        return _read_json(path, text, column)
    for delimiter in _DELIMITERS.values():
        if delimiter in first_line.strip():
            return _read_table(path, text, delimiter, column)
    return _read_plain(path, text, column)


def _decode(path: Path, data: bytes) -> str:
    try:
        if b"\0" not in data:
            return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise LengthsError(f"{path} is a binary file", "Give JSON, JSON lines, CSV, plain text or Megatron .idx.")


def _entry(index: int) -> str:
    return f"entry {index}"


def _read_json(path: Path, text: str, column: str | None) -> _Entries:
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        several = error.msg == "Extra data"
        raise LengthsError(
            f"{path}, line {error.lineno}: not JSON ({error.msg})",
            "A .json file holds one list; name a file with one value a line .jsonl."
            if several
            else "Mend that line: a .json file holds one list, [12, 345].",
        ) from None
    except (RecursionError, ValueError):
        raise LengthsError(f"{path}: JSON nested too deep, or a number too long", "Give a list.") from None
    if not isinstance(body, list):
        raise LengthsError(f"{path} holds a JSON {_kind(body)}, not a list", "Give a list of whole numbers.")
    return _take(path, body, _entry, column)


def _read_json_lines(path: Path, text: str, column: str | None) -> _Entries:
    lines = _Lines(text)
    try:
        # One parse of the joined lines is several times faster than one parse a line.
        values = json.loads("[" + ",".join(lines.texts) + "]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines.texts):
        values = [_parse_line(path, lines.where(i), line) for i, line in enumerate(lines.texts)]
    return _take(path, values, lines.where, column)


def _parse_line(path: Path, where: str, line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise LengthsError(
            f"{path}, {where}: not JSON: {_show(line)}", "Give one number or one object a line."
        ) from None


def _read_plain(path: Path, text: str, column: str | None) -> _Entries:
    if column is not None:
        raise LengthsError(
            f"{path} is plain text and has no column {column!r}", "Leave the column out, or give CSV."
        )
    lines = _Lines(text)
    return _Entries(lines.texts, lines.where)


class _Lines:
    """Lines that are not blank, and the line number of each."""

    def __init__(self, text: str) -> None:
        self._all = text.split("\n")
        self.texts = [line for line in self._all if line and not line.isspace()]

    def where(self, index: int) -> str:
        numbers = (n for n, line in enumerate(self._all, 1) if line and not line.isspace())
        return f"line {next(islice(numbers, index, None))}"


def _read_table(path: Path, text: str, delimiter: str, column: str | None) -> _Entries:
    def rows() -> tuple[Any, Iterator[list[str]]]:
        reader = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
        return reader, (row for row in reader if row)

    def where(index: int) -> str:
        reader, body = rows()
        next(islice(body, index + skipped, None))
        return f"line {reader.line_num}"

    try:
        _, body = rows()
        if not (header := next(body, [])):
            raise LengthsError(f"{path} is empty", "Give at least one length.")
        has_header = not any(_is_number(cell) for cell in header) or _names_lengths(header, column)
        skipped = int(has_header)
        if has_header:
            names = [name.strip() for name in header]
            position = names.index(_choose(path, names, column))
        elif len(header) == 1 and column is None:
            position, (_, body) = 0, rows()
        else:
            raise LengthsError(f"{path} has no header line", "Name the columns in the first line.")
        return _Entries([row[position] if position < len(row) else "" for row in body], where)
    except csv.Error as error:
        raise LengthsError(f"{path}: not a table ({error})", "Check quotes and delimiters.") from None


def _names_lengths(header: list[str], column: str | None) -> bool:
    """A first line that holds numbers is a header all the same if it has the name that is looked for."""
    wanted = USUAL_COLUMNS if column is None else (column,)
    return any(name.strip() in wanted and not _is_number(name) for name in header)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------- values to lengths


def _take(path: Path, values: list[Any], where: Callable[[int], str], column: str | None) -> _Entries:
    """Lengths and spans out of numbers and objects."""
    if dict not in set(map(type, values)):
        if column is not None and values:
            raise LengthsError(
                f"{path} holds plain numbers and has no column {column!r}", "Leave the column out."
            )
        return _Entries(values, where)
    lengths: list[object] = []
    spans: dict[int, object] = {}
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            lengths.append(value)
            continue
        if "spans" in value:
            spans[index] = value["spans"]
        names = [name for name in value if name != "spans"]
        lengths.append(value[_choose(path, names, column, where(index) if not index else "")])
    return _Entries(lengths, where, spans)


def _choose(path: Path, names: list[str], column: str | None, where: str = "") -> str:
    """The column that holds the lengths."""
    for name in (column,) if column is not None else USUAL_COLUMNS:
        if name in names:
            return name
    if column is None and len(names) == 1:
        return names[0]
    known = ", ".join(names) if names else "none"
    place = f"{path}, {where}" if where else f"{path}"
    if column is None:
        raise LengthsError(
            f"{place}: which column holds the lengths? There are: {known}", "Name the column (--column)."
        )
    raise LengthsError(f"{place}: no column {column!r}", f"Columns there are: {known}.")


def _to_array(path: Path, entries: _Entries) -> Lengths:
    """Whole numbers as int64; the common cases take no Python loop."""
    values = entries.values
    if not len(values):
        raise LengthsError(f"{path} holds no lengths", "Give at least one length.")
    try:
        kinds = set(map(type, values))
        if kinds == {str}:
            array = np.array([int(text) for text in cast(Sequence[str], values)], dtype=np.int64)
        elif kinds == {int}:
            array = np.array(values, dtype=np.int64)
        else:
            raise ValueError
    except (ValueError, OverflowError):
        checked = [_as_length(path, value, entries.where, i) for i, value in enumerate(values)]
        return np.array(checked, dtype=np.int64)
    _refuse_below_one(path, array, entries.where)
    return array


def _refuse_below_one(path: Path, lengths: Lengths, where: Callable[[int], str]) -> None:
    bad = np.flatnonzero(lengths < 1)
    if bad.size:
        index = int(bad[0])
        _refuse(path, where(index), int(lengths[index]))


def _as_length(path: Path, value: object, where: Callable[[int], str], index: int) -> int:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
            number = int(value)
        except ValueError:
            pass  # a fraction stays a float, words stay words; both are judged below
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**63:
        _refuse(path, where(index), value)
    return number


def _refuse(path: Path, where: str, value: object) -> NoReturn:
    raise LengthsError(f"{path}, {where}: {_show(value)} is not a length", _WHOLE)


def _show(value: object) -> str:
    """A value as its author wrote it, cut to fit a line."""
    text = (value.strip() or "an empty cell") if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _kind(body: object) -> str:
    return {dict: "object", str: "string", bool: "truth value", type(None): "null"}.get(type(body), "number")


def _make_sample(path: Path, entries: _Entries, index: int, tokens: int) -> Sample:
    spans = entries.spans.get(index, [])
    try:
        pairs = tuple((a, b) for a, b in spans)  # type: ignore[attr-defined]
        if any(type(end) is not int for pair in pairs for end in pair):
            raise TypeError
        return Sample(index, tokens, pairs)
    except (TypeError, ValueError):
        raise LengthsError(
            f"{path}, {entries.where(index)}: spans {_show(spans)} are not pairs of whole numbers",
            "Spans are [[start, stop], ...], half-open row ranges.",
        ) from None
    except LengthsError as error:
        raise LengthsError(f"{path}, {entries.where(index)}: {error.cause}", error.remedy) from None
