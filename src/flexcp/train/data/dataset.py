"""A map-style data set of token ids over documents, a tokenizer and a length index.

Nothing is truncated, padded, packed or shuffled here: a sample is one whole document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import DataError
from flexcp.core.nearest import near_path
from flexcp.train.data.chats import ChatTokenizer, Learn, as_chat
from flexcp.train.data.columnar import Parquet, SavedDataset
from flexcp.train.data.documents import (
    Documents,
    JsonLines,
    Read,
    Skipped,
    TextFiles,
    as_document,
    file_kind,
    find_files,
)
from flexcp.train.data.index import (
    LengthIndex,
    Progress,
    build_index,
    load_index,
    name_skipped,
    save_index,
    skipped_by,
)
from flexcp.train.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer

TooLong = Literal["error", "skip"]

ANY_FILE = "**/*"


class TextDataset:
    """Samples of causal text: one document each, whole.

    Args:
        documents, tokenizer, index: what to read, how, and how long it will be.
        max_tokens: the longest sample wanted; None takes any.
        remedy: how a user may allow longer ones.
        too_long: what to do about longer ones: refuse the data set, or leave them out and say so.

    Attributes:
        lengths: int64 [samples], tokens per sample, read-only.
        skipped: every reason for which something is no sample, with count and first names.
        identity: what makes it this data set, by name, so that a difference can be named; a copy of the data
            keeps it.

    Raises:
        DataError: no sample is left, or one is too long and `too_long` is "error".
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        index: LengthIndex,
        *,
        max_tokens: int | None = None,
        too_long: TooLong = "error",
        remedy: str = "Raise max_tokens",
    ) -> None:
        self.tokenizer = tokenizer
        self._documents = documents
        counts = index.lengths
        longer = counts > (np.iinfo(np.int64).max if max_tokens is None else max_tokens)
        if longer.any() and too_long == "error":
            longest = int(counts.argmax())
            raise DataError(
                f"{documents.name(longest)} has {counts[longest]} tokens, more than {max_tokens}, "
                f"and so have {int(longer.sum())} of {len(counts)} documents in all",
                f"{remedy}, or leave such documents out with too_long = 'skip'.",
            )
        self.skipped: tuple[Skipped, ...] = (
            *documents.skipped,
            *skipped_by(documents, counts),
            *name_skipped(documents, f"longer than {max_tokens} tokens", np.flatnonzero(longer)),
        )
        self._kept = np.flatnonzero((counts > 0) & ~longer)
        if not len(self._kept):
            raise DataError("the data gives no sample", "; ".join(map(str, self.skipped)) or "It is empty.")
        self.lengths: npt.NDArray[np.int64] = counts[self._kept]
        self.lengths.flags.writeable = False
        self.identity = self._identity(index)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        """Token ids of one sample.

        Returns:
            `input_ids` and `labels`, int64 [tokens] each. Labels are not shifted; -100 would mark a token
            that is not learned, and plain text has none.

        Raises:
            DataError: the text no longer has the length that the index says.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        text = self._documents[int(self._kept[index])]
        ids, labels = self._encode(text or "")
        if not text or len(ids) != self.lengths[index]:
            now = f"{len(ids)} tokens" if text else "no text"
            raise DataError(
                f"{self.name(index)} had {self.lengths[index]} tokens in the length index and now has {now}",
                "The data changed under the run; build the index again: rebuild=True.",
            )
        return {"input_ids": ids, "labels": labels}

    def _encode(self, text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if isinstance(self.tokenizer, ChatTokenizer) and text:
            tokens, labels = self.tokenizer.encode_labelled(text)
            return tokens.astype(np.int64), labels
        ids = self.tokenizer.encode(text).astype(np.int64)
        return ids, ids.copy()

    def name(self, index: int) -> str:
        """What to call a sample in a message."""
        return self._documents.name(int(self._kept[index]))

    def _identity(self, index: LengthIndex) -> dict[str, str]:
        # Without times and places: a copy on another machine is the same data set.
        files = json.dumps([(stamp.name, stamp.size) for stamp in index.files])
        rows = self._kept.astype("<i8").tobytes() + self.lengths.astype("<i8").tobytes()
        return {
            "tokenizer": str(index.tokenizer),
            "data (files and their sizes)": f"{len(index.files)} files, {_short(files.encode())}",
            "samples": f"{len(self._kept)} of {int(self.lengths.sum())} tokens, {_short(rows)}",
        }


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def open_dataset(
    path: str | Path,
    *,
    tokenizer: str | Path = "bytes",
    pattern: str = ANY_FILE,
    exclude: Sequence[str] = (),
    text_column: str = "text",
    chat_column: str | None = None,
    learn: Learn = "assistant",
    index_dir: str | Path | None = None,
    max_tokens: int | None = None,
    too_long: TooLong = "error",
    remedy: str = "Raise max_tokens",
    progress: Progress | None = None,
    rebuild: bool = False,
) -> TextDataset:
    """Open data for training, building its length index if there is none yet.

    Args:
        path: see `open_documents`.
        tokenizer: see `open_tokenizer`.
        pattern: which files of a folder to read.
        exclude: names of files and folders to leave out (see `find_files`).
        text_column: key or column that holds the text.
        chat_column: key or column that holds chats, read instead of text; the tokenizer is then the folder of
            a chat model.
        learn: what of a chat has labels.
        index_dir: where to keep the index; None is `.flexcp` beside the data.
        max_tokens: see `TextDataset`.
        too_long: see `TextDataset`.
        remedy: see `TextDataset`.
        progress: called with (documents done, documents in all) while an index is built.
        rebuild: build the index even if there is one.

    Raises:
        DataError: the data cannot be read, or changed since its index was built.
        MissingExtraError: a library for this kind of data is not installed.
    """
    column, read = (text_column, as_document) if chat_column is None else (chat_column, as_chat)
    documents = open_documents(path, pattern=pattern, exclude=exclude, text_column=column, read=read)
    loaded = open_tokenizer(tokenizer) if chat_column is None else ChatTokenizer(tokenizer, learn)
    # Lengths do not depend on what is learned, but the index knows the tokenizer that does.
    chat = [] if chat_column is None else ["chat", learn]
    file = index_path(path, [str(tokenizer), pattern, column, *chat, *exclude], index_dir)
    if rebuild or not file.exists():
        index = build_index(documents, loaded, progress)
        save_index(index, file)
    else:
        index = load_index(file, documents, loaded)
    return TextDataset(documents, loaded, index, max_tokens=max_tokens, too_long=too_long, remedy=remedy)


def open_tokenizer(tokenizer: str | Path) -> Tokenizer:
    """`bytes`, or the path of a `tokenizer.json` or of the folder that holds one."""
    return ByteTokenizer() if str(tokenizer) == "bytes" else FileTokenizer(tokenizer)


def open_documents(
    path: str | Path,
    *,
    pattern: str = ANY_FILE,
    exclude: Sequence[str] = (),
    text_column: str = "text",
    read: Read = as_document,
) -> Documents:
    """Find out what kind of data a path holds.

    A folder is what `save_to_disk` wrote, or else what all its matching files are: .parquet, .jsonl, or
    text. A file is one of these by its suffix; any other suffix is one text document.

    Raises:
        DataError: nothing there, or a folder whose files are of several kinds.
    """
    root = Path(path)
    if not root.exists():
        raise DataError(f"{root} does not exist", near_path(root))
    if (root / "dataset_dict.json").is_file():
        splits = sorted(entry.parent.name for entry in root.glob("*/state.json"))
        raise DataError(
            f"{root} holds the splits {', '.join(splits)}", f"Name one of them: {root / (splits or ['?'])[0]}"
        )
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return SavedDataset(root, text_column, read)
    return _open_files(root, pattern, exclude, text_column, read)


def _open_files(root: Path, pattern: str, exclude: Sequence[str], text_column: str, read: Read) -> Documents:
    found = find_files(root, pattern, exclude)
    kinds = sorted({file_kind(path) for path in found.paths})
    if len(kinds) > 1:
        raise DataError(
            f"{root} mixes {' and '.join(kinds)} files under {pattern!r}",
            "Say which to read with a pattern, such as '**/*.jsonl' or '**/*.py'.",
        )
    match kinds[0]:
        case "parquet":
            return Parquet(found, text_column, read)
        case "jsonl":
            return JsonLines(found, text_column, read)
        case _ if read is not as_document:
            raise DataError(
                f"{root} holds text files, and no chats", "Chats are .jsonl, .parquet or data sets."
            )
        case _:
            return TextFiles(found)


def index_path(path: str | Path, options: Sequence[str], index_dir: str | Path | None = None) -> Path:
    """Where the index of these options is kept; other options have another file."""
    root = Path(path)
    if index_dir is None:
        folder = (root if root.is_dir() else root.parent) / ".flexcp"
    else:
        # A folder of indices may serve data of the same name from several places.
        folder, options = Path(index_dir), (*options, str(root.resolve()))
    key = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:8]
    return folder / f"{root.resolve().name}-{key}.npz"
