"""Documents in a text column of parquet files, or of a data set that Hugging Face saved to disk.

Needs pyarrow alone: the `datasets` library is neither used nor asked for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from flexcp.core.errors import DataError, MissingExtraError
from flexcp.train.data.documents import (
    FileSet,
    Read,
    Skipped,
    as_document,
    fingerprint_files,
    first_indices,
    locate,
    stamp_files,
)

# Shuffled access returns to a row group again and again; a few decoded ones are kept.
_KEPT_GROUPS = 4


class Parquet:
    """Rows of parquet files; only the text column is read, a row group at a time.

    Shuffled access decodes a row group for almost every row, so small row groups (100 to 1000 rows) load
    fastest.

    Raises:
        DataError: a file is not parquet, or has no such column.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, found: FileSet, column: str, read: Read = as_document) -> None:
        self._paths = found.paths
        self._column = column
        self._as_document = read
        self.files = stamp_files(found)
        self.skipped = found.skipped
        self._groups: list[tuple[int, int]] = []  # (file, row group) by position
        counts = []
        for file, path in enumerate(self._paths):
            metadata = self._open(path).metadata
            for group in range(metadata.num_row_groups):
                self._groups.append((file, group))
                counts.append(metadata.row_group(group).num_rows)
        self._firsts = first_indices(counts)
        self._kept: OrderedDict[tuple[int, str], Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> str | None:
        group, row = locate(self._firsts, index)
        return _text(self._read(group, self._column), row, self.name(index), self._as_document)

    def value(self, index: int, column: str) -> object:
        """What another column of the row holds."""
        group, row = locate(self._firsts, index)
        value: object = self._read(group, column)[row].as_py()
        return value

    def name(self, index: int) -> str:
        """File and row in it, from 0."""
        group, row = locate(self._firsts, index)
        file, _ = self._groups[group]
        first = next(i for i, (other, _) in enumerate(self._groups) if other == file)
        return f"{self.files[file].name}:row {row + int(self._firsts[group] - self._firsts[first])}"

    def fingerprint(self) -> str:
        """Of the files and the column."""
        return fingerprint_files("parquet", self.files, self._column)

    def _read(self, group: int, column: str) -> Any:
        key = group, column
        with self._lock:
            if key not in self._kept:
                file, number = self._groups[group]
                opened = self._open(self._paths[file])
                _check_column(self._paths[file], opened.schema_arrow.names, column)
                self._kept[key] = opened.read_row_group(number, columns=[column])[column]
                if len(self._kept) > _KEPT_GROUPS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _open(self, path: Path) -> Any:
        arrow = _library()
        try:
            file = arrow.parquet.ParquetFile(path)
        except (OSError, arrow.ArrowInvalid) as error:
            raise DataError(
                f"{path} is not a readable parquet file ({_first_line(error)})", "Write it again."
            ) from None
        _check_column(path, file.schema_arrow.names, self._column)
        return file


class SavedDataset:
    """One split that `datasets` wrote with `save_to_disk`; its arrow files are mapped, not loaded.

    Raises:
        DataError: files are missing or damaged, the column is not there, or rows were selected by an
            index table that is not part of the arrow files.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, root: Path, column: str, read: Read = as_document) -> None:
        state = _read_state(root)
        paths = tuple(root / entry["filename"] for entry in state.get("_data_files", []))
        if state.get("_indices_data_files"):
            raise DataError(
                f"{root} keeps a selection of rows in a table of its own",
                "Save it again after dataset.flatten_indices().",
            )
        self._column = column
        self._as_document = read
        self.files = stamp_files(FileSet(root, paths, ()))
        self.skipped: tuple[Skipped, ...] = ()
        self._columns = [_map_column(path, column) for path in paths]
        self._firsts = first_indices(len(values) for values in self._columns)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> str | None:
        file, row = locate(self._firsts, index)
        return _text(self._columns[file], row, self.name(index), self._as_document)

    def name(self, index: int) -> str:
        """File and row in it, from 0."""
        file, row = locate(self._firsts, index)
        return f"{self.files[file].name}:row {row}"

    def fingerprint(self) -> str:
        """Of the files and the column."""
        return fingerprint_files("arrow", self.files, self._column)


def _read_state(root: Path) -> dict[str, Any]:
    try:
        state = json.loads((root / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{root / 'state.json'} cannot be read ({error})", "Save it again with save_to_disk."
        ) from None
    if not isinstance(state, dict):
        raise DataError(f"{root / 'state.json'} is not an object", "Save it again with save_to_disk.")
    return state


def _map_column(path: Path, column: str) -> Any:
    arrow = _library()
    try:
        table = arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all()
    except (OSError, arrow.ArrowInvalid) as error:
        raise DataError(
            f"{path} is not a readable arrow stream ({_first_line(error)})",
            "Save it again with save_to_disk.",
        ) from None
    _check_column(path, table.column_names, column)
    return table.column(column)


def _text(values: Any, row: int, name: str, read: Read) -> str | None:
    try:
        return read(values[row].as_py(), name)
    except UnicodeDecodeError:
        return None


def _check_column(path: Path, names: Sequence[str], column: str) -> None:
    if column not in names:
        raise DataError(
            f"{path} has no column {column!r}; it has: {', '.join(names)}",
            "Name the column that is meant (text_column, image_column).",
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _library() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "train") from None
    return pyarrow
