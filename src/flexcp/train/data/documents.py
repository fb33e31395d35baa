"""Documents on disk behind one protocol: folders of text and JSON lines (parquet and arrow: `columnar`).

Nothing is tokenized here, and no more than one document is held in memory at a time.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import DataError

_CACHE_FOLDERS = frozenset({"__pycache__", "node_modules"})
_CHUNK_BYTES = 1 << 24

# How many of the things skipped are named.
NAMED = 3

_OPTION = {"text": "text_column", "images": "image_column"}


class FileStamp(NamedTuple):
    """A file as it was when the documents were opened; `name` is relative to what was opened."""

    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something left out, why, how often, and the first few by name."""

    reason: str
    count: int
    first: tuple[str, ...]

    def __str__(self) -> str:
        more = ", …" if self.count > len(self.first) else ""
        return f"{self.count} skipped, {self.reason}: {', '.join(self.first)}{more}"


# A value of the column that is read, and a name for messages, to the document; None where there is none.
Read = Callable[[object, str], str | None]


class Documents(Protocol):
    """Texts by index.

    Attributes:
        files: every file read, in order.
        skipped: what the reader passed over while it looked for files.
    """

    @property
    def files(self) -> tuple[FileStamp, ...]: ...  # noqa: D102
    @property
    def skipped(self) -> tuple[Skipped, ...]: ...  # noqa: D102

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str | None:
        """Text of a document; None where it holds none (a binary file, a null)."""
        ...

    def name(self, index: int) -> str:
        """What to call a document in a message: file, and row or line."""
        ...

    def fingerprint(self) -> str:
        """Changes when a file, its size, its time or the way of reading changes; reads no content."""
        ...


class FileSet(NamedTuple):
    """Files to read in order, the folder their names are relative to, and the links passed over."""

    base: Path
    paths: tuple[Path, ...]
    skipped: tuple[Skipped, ...]


class TextFiles:
    """Every file is one document; one that is not UTF-8 text gives None."""

    def __init__(self, found: FileSet) -> None:
        self._paths = found.paths
        self.skipped = found.skipped
        self.files = stamp_files(found)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str | None:
        return _as_text(_read_bytes(self._paths[index]))

    def name(self, index: int) -> str:
        """Path relative to the folder."""
        return self.files[index].name

    def fingerprint(self) -> str:
        """Of the files."""
        return fingerprint_files("text", self.files)


class JsonLines:
    """JSON lines, one file or many: every line is an object, one key of it is the text.

    Keeps 24 bytes a line in memory; lines are read where they stand. Blank lines are no documents.
    A null, or a text with half a surrogate pair, gives None.

    Raises:
        DataError: a file cannot be read; on access, a line that is not such an object.
    """

    def __init__(self, found: FileSet, column: str, read: Read | None = None) -> None:
        self._paths = found.paths
        self._column = column
        self._read = read or as_document
        self.files = stamp_files(found)
        self.skipped = found.skipped
        self._lines = [_find_lines(path) for path in found.paths]
        self._firsts = first_indices(len(lines) for lines in self._lines)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> str | None:
        line = self._line(index)
        text = self._read(self._value(index, line, self._column, "text"), self.name(index))
        return None if text is not None and b"\\u" in line and _has_surrogates(text) else text

    def value(self, index: int, column: str) -> object:
        """What another key of the line holds."""
        return self._value(index, self._line(index), column, "images")

    def _line(self, index: int) -> bytes:
        file, row = locate(self._firsts, index)
        start, stop, _ = self._lines[file][row]
        with _open(self._paths[file]) as stream:
            stream.seek(start)
            return stream.read(stop - start)

    def _value(self, index: int, line: bytes, key: str, what: str) -> object:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{self.name(index)} is not JSON", "Give one JSON object a line.") from None
        if not isinstance(record, dict) or key not in record:
            names = ", ".join(record) if isinstance(record, dict) else "no object there"
            raise DataError(
                f"{self.name(index)} has no key {key!r}; it has: {names}",
                f"Name the key that holds the {what} ({_OPTION[what]}).",
            )
        return record[key]

    def name(self, index: int) -> str:
        """File and line number."""
        file, row = locate(self._firsts, index)
        return f"{self.files[file].name}:{self._lines[file][row, 2]}"

    def fingerprint(self) -> str:
        """Of the files and the key."""
        return fingerprint_files("jsonl", self.files, self._column)


# ------------------------------------------------------------------------- shared by all the readers


def find_files(root: Path, pattern: str, exclude: Sequence[str] = ()) -> FileSet:
    """Files of a folder that match, sorted by name; a file is a folder of one.

    Args:
        root: folder or file.
        pattern: which files of a folder.
        exclude: names, as shell patterns, of files and folders to leave out, wherever they are.

    Hidden files and folders, `__pycache__` and `node_modules` are never data. A link to a text file is
    passed over, and so is all below a linked folder: they would repeat documents. A linked data file is
    read: the cache of the Hugging Face hub is made of them.

    Raises:
        DataError: nothing matches, or the pattern leaves the folder.
    """
    if root.is_file():
        return FileSet(root.parent, (root,), ())
    if not pattern or PurePath(pattern).is_absolute() or ".." in PurePath(pattern).parts:
        raise DataError(f"pattern {pattern!r} leaves {root}", "Give a pattern inside it, such as '**/*.py'.")
    found: list[tuple[str, Path]] = []
    links: list[str] = []
    linked_folders: dict[Path, bool] = {root: False}
    for path in _matches(root, pattern):
        parts = path.relative_to(root).parts
        if any(part.startswith(".") or part in _CACHE_FOLDERS for part in parts) or not path.is_file():
            continue
        if any(fnmatchcase(part, unwanted) for part in parts for unwanted in exclude):
            continue
        name = "/".join(parts)
        linked_text = path.is_symlink() and file_kind(path) == "text"
        if linked_text or _is_below_link(path.parent, linked_folders):
            links.append(name)
        else:
            found.append((name, path))
    skipped = (Skipped("symbolic link", len(links), tuple(sorted(links)[:NAMED])),) if links else ()
    if not found:
        told = "".join(f" ({note})" for note in skipped)
        raise DataError(f"no file in {root} matches {pattern!r}{told}", "Give another folder or pattern.")
    return FileSet(root, tuple(path for _, path in sorted(found)), skipped)


def _matches(root: Path, pattern: str) -> Iterator[Path]:
    try:
        yield from root.glob(pattern)
    except (ValueError, IndexError, OSError) as error:  # IndexError: "." in Python 3.11
        raise DataError(
            f"pattern {pattern!r} cannot be looked for in {root} ({error})",
            "Give a pattern such as '**/*.py', and a folder that can be read.",
        ) from error


def file_kind(path: Path) -> str:
    """`parquet`, `jsonl` or `text`, by suffix."""
    if path.suffix == ".parquet":
        return "parquet"
    return "jsonl" if path.suffix in (".jsonl", ".ndjson") else "text"


def _is_below_link(folder: Path, known: dict[Path, bool]) -> bool:
    if folder not in known:
        known[folder] = folder.is_symlink() or _is_below_link(folder.parent, known)
    return known[folder]


def stamp_files(found: FileSet) -> tuple[FileStamp, ...]:
    """Name, size and time of each file."""
    stamps = []
    for path in found.paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})", "Check the path.") from None
        stamps.append(FileStamp(path.relative_to(found.base).as_posix(), stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


def fingerprint_files(kind: str, files: Sequence[FileStamp], *options: str) -> str:
    """SHA-256 over the kind of reader, its options and its files."""
    return hashlib.sha256(json.dumps([kind, options, files]).encode()).hexdigest()


def _open(path: Path) -> io.BufferedReader:
    """Open for reading, failing with DataError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "Check the path.") from None


def _read_bytes(path: Path) -> bytes:
    """Content of a file, failing with DataError."""
    with _open(path) as stream:
        return stream.read()


def _as_text(content: bytes) -> str | None:
    """UTF-8 text, or None for anything else."""
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def as_document(value: object, name: str) -> str | None:
    """A value of a text column: text or null.

    Raises:
        DataError: it is something else, so the column is not text.
    """
    if value is None or isinstance(value, str):
        return value
    raise DataError(
        f"{name} holds a {type(value).__name__} where text belongs",
        "Name the column that holds the text (text_column).",
    )


def first_indices(counts: Iterable[int]) -> npt.NDArray[np.int64]:
    """Index of the first document of each file, and the total at the end: int64 [files + 1]."""
    return np.cumsum([0, *counts], dtype=np.int64)


def locate(firsts: npt.NDArray[np.int64], index: int) -> tuple[int, int]:
    """File and row of a document."""
    if not 0 <= index < firsts[-1]:
        raise IndexError(index)
    file = int(np.searchsorted(firsts, index, side="right")) - 1
    return file, int(index - firsts[file])


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _find_lines(path: Path) -> npt.NDArray[np.int64]:
    """Start, stop and line number of every line that is not blank: int64 [lines, 3]."""
    ends: list[npt.NDArray[np.int64]] = []
    offset, last = 0, b"\n"
    with _open(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + offset)
            offset, last = offset + len(chunk), chunk[-1:]
    if last != b"\n":
        ends.append(np.array([offset]))
    stops = np.concatenate(ends or [np.zeros(0, np.int64)]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops + 1])[: len(stops)]
    numbers = np.arange(1, len(stops) + 1)
    # The shortest object is {}: what is shorter is a blank line, or an error that says nothing lost.
    long_enough = np.flatnonzero(stops - starts >= 2)
    return np.stack([starts[long_enough], stops[long_enough], numbers[long_enough]], axis=1)
