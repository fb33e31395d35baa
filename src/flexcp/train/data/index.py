"""The length index: tokens of every document, counted once and kept as one small file.

It holds lengths and fingerprints, never text. Who builds and who waits is the caller's to arrange: one
rank builds, then the others load.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import DataError
from flexcp.train.data.documents import NAMED, Documents, FileStamp, Skipped
from flexcp.train.data.tokenizers import TEACHES_NOTHING, Tokenizer

INDEX_SCHEMA = "flexcp.index/1"

# Lengths that stand for documents which give no sample.
EMPTY = 0
NOT_TEXT = -1

# Called with (documents done, documents in all).
Progress = Callable[[int, int], None]

# A batch large enough to keep every core busy, small enough to forget.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4_000_000

_REBUILD = "Build it again: rebuild=True, or delete the file."


@dataclass(frozen=True, eq=False)
class LengthIndex:
    """Token counts, and what they were counted from.

    Attributes:
        lengths: int64 [documents]; `EMPTY` and `NOT_TEXT` mark documents without a sample.
        documents: fingerprint of the documents.
        tokenizer: fingerprint of the tokenizer.
        files: every file of the documents, so that a change can be named.
    """

    lengths: npt.NDArray[np.int64]
    documents: str
    tokenizer: str
    files: tuple[FileStamp, ...]


def build_index(documents: Documents, tokenizer: Tokenizer, progress: Progress | None = None) -> LengthIndex:
    """Count the tokens of every document.

    Documents are read one batch at a time. The tokenizers library spreads a batch over all cores, so
    there are no worker processes here.

    Raises:
        DataError: a document cannot be read.
    """
    total = len(documents)
    lengths = np.full(total, NOT_TEXT, dtype=np.int64)
    done = 0
    for batch in _batches(documents):
        texts = [(i, text) for i, text in batch if text]
        for (i, _), count in zip(texts, tokenizer.count([text for _, text in texts]), strict=True):
            lengths[i] = count
        for i, text in batch:
            if text == "":
                lengths[i] = EMPTY
        done += len(batch)
        if progress is not None:
            progress(done, total)
    return LengthIndex(lengths, documents.fingerprint(), tokenizer.fingerprint, documents.files)


def skipped_by(documents: Documents, lengths: npt.NDArray[np.int64]) -> tuple[Skipped, ...]:
    """Documents that give no sample, by reason."""
    reasons = (("not text", NOT_TEXT), ("empty", EMPTY), ("no turn to learn", TEACHES_NOTHING))
    return tuple(
        record
        for reason, mark in reasons
        for record in name_skipped(documents, reason, np.flatnonzero(lengths == mark))
    )


def name_skipped(documents: Documents, reason: str, found: npt.NDArray[np.int64]) -> tuple[Skipped, ...]:
    """One record of the documents found, naming the first few; none where there are none."""
    first = tuple(documents.name(int(i)) for i in found[:NAMED])
    return (Skipped(reason, len(found), first),) if len(found) else ()


def _batches(documents: Documents) -> Iterator[list[tuple[int, str | None]]]:
    batch: list[tuple[int, str | None]] = []
    characters = 0
    for i in range(len(documents)):
        text = documents[i]
        batch.append((i, text))
        characters += len(text or "")
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def save_index(index: LengthIndex, path: Path) -> None:
    """Write the index; the file appears whole or not at all.

    Raises:
        DataError: the folder cannot be written.
    """
    header = {
        "schema": INDEX_SCHEMA,
        "documents": index.documents,
        "tokenizer": index.tokenizer,
        "files": index.files,
    }
    packed = np.frombuffer(json.dumps(header).encode(), np.uint8)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as stream:
                np.savez_compressed(stream, header=packed, lengths=index.lengths)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"the length index {path} cannot be written ({error.strerror})",
            "Name a folder that can be written (index_dir).",
        ) from None


def load_index(path: Path, documents: Documents, tokenizer: Tokenizer) -> LengthIndex:
    """Read an index and make sure that it belongs to these documents and this tokenizer.

    Raises:
        DataError: no index, a damaged one, or one of other data; names what changed.
    """
    index = _read(path)
    if index.tokenizer != tokenizer.fingerprint:
        raise DataError(f"the tokenizer is not the one that the length index {path} was built with", _REBUILD)
    if index.documents != documents.fingerprint():
        change = _first_change(index.files, documents.files)
        raise DataError(f"the data changed since the length index {path} was built: {change}", _REBUILD)
    if len(index.lengths) != len(documents):
        raise DataError(
            f"the length index {path} counts {len(index.lengths)} documents, there are {len(documents)}",
            _REBUILD,
        )
    return index


def _read(path: Path) -> LengthIndex:
    try:
        # Opened here: np.load leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            header = json.loads(stored["header"].tobytes())
            lengths = stored["lengths"].astype(np.int64)
        if header["schema"] != INDEX_SCHEMA:
            raise DataError(
                f"the length index {path} has the schema {header['schema']!r}; "
                f"this version reads {INDEX_SCHEMA!r}",
                _REBUILD,
            )
        files = tuple(FileStamp(*entry) for entry in header["files"])
        return LengthIndex(lengths, header["documents"], header["tokenizer"], files)
    except FileNotFoundError:
        raise DataError(f"there is no length index {path}", "Build it first.") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"the length index {path} is damaged ({type(error).__name__})", _REBUILD) from None


def _first_change(before: Sequence[FileStamp], now: Sequence[FileStamp]) -> str:
    old = {stamp.name: stamp for stamp in before}
    new = {stamp.name: stamp for stamp in now}
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"{name} is gone"
        if name not in old:
            return f"{name} is new"
        if old[name].size != new[name].size:
            return f"{name} had {old[name].size} bytes and has {new[name].size}"
        if old[name] != new[name]:
            return f"{name} was written again"
    return "it is read in another way (kind or text column)"
