"""Rows of a Hugging Face trainer as samples: each document by itself, labels as the collator makes them.

A trainer packs documents into rows of one length to waste no padding. FlexCP packs anew for every step,
without padding, so rows are taken apart: where `seq_lengths`, `cu_seq_lens` or position ids that begin at 0
say that a document ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexcp.core.errors import DataError, UnsupportedError

Lengths = NDArray[np.int64]
Collator = Callable[[list[Any]], Any]

# What a collator may give beside tokens and labels, and what becomes of it.
_UNDERSTOOD = {
    "input_ids",
    "labels",
    "attention_mask",  # padding is cut off
    "position_ids",  # say where documents begin; a sample's own positions count from 0
    "seq_lengths",
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


class RowSamples:
    """The samples of a data set of rows (see `runtime.batches.Dataset`).

    Args:
        rows: a `datasets.Dataset`, or any sequence of rows with `input_ids`.
        collate: the trainer's own collator; it is given one row at a time.

    Attributes:
        lengths: int64 [samples].
        num_rows: rows they come from.

    Raises:
        DataError: the rows have no length, hold no tokens, or a column of another length than the tokens.
    """

    def __init__(self, rows: Any, collate: Collator) -> None:
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise DataError(
                f"a {type(rows).__name__} has no length, and plans need the lengths of samples",
                "Give a data set with rows, not a stream of them.",
            )
        self._rows, self._collate = rows, collate
        self._last: tuple[int, dict[str, Lengths]] | None = None
        self.num_rows = len(rows)
        firsts, lengths, owners = [], [], []
        for row, parts in enumerate(_documents(rows)):
            first = 0
            for tokens in parts:
                if tokens:
                    firsts.append(first)
                    lengths.append(tokens)
                    owners.append(row)
                first += tokens
        if not lengths:
            raise DataError("the rows hold no tokens", "Give rows with a list of input_ids.")
        self.lengths: Lengths = np.array(lengths, dtype=np.int64)
        self._firsts, self._owners = firsts, owners

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Lengths]:
        """`input_ids` and `labels` of one sample, int64 [tokens] each."""
        whole = self._row(self._owners[index])
        part = slice(self._firsts[index], self._firsts[index] + int(self.lengths[index]))
        return {name: values[part] for name, values in whole.items()}

    def _row(self, row: int) -> dict[str, Lengths]:
        """A collated row; the last is kept, since the documents of a packed row are often read together."""
        last = self._last  # the engine's thread may read as well
        if last is not None and last[0] == row:
            return last[1]
        given = self._rows[row]
        batch = self._collate([given])
        _refuse_unknown(batch)
        if "labels" not in batch:
            raise UnsupportedError(
                "the collator gives no labels, so what is to be learned is not known",
                "Use one that makes them, such as DataCollatorForLanguageModeling(tokenizer, mlm=False).",
            )
        ids, labels = _flat(batch["input_ids"]), _flat(batch["labels"])
        mask = batch.get("attention_mask")
        if mask is not None:
            kept = _flat(mask) != 0
            ids, labels = ids[kept], labels[kept]
        tokens = _unpadded(given)
        if tokens < len(given["input_ids"]) and tokens != len(ids):
            raise UnsupportedError(
                f"row {row} has {tokens} tokens by its attention_mask, and {len(ids)} as it is collated",
                "Leave padding to the collator, or use one that keeps the attention_mask of rows.",
            )
        made = {"input_ids": ids, "labels": labels}
        self._last = row, made
        return made

    def name(self, index: int) -> str:
        """Row, and which document of it."""
        row = self._owners[index]
        document = index - self._owners.index(row)
        alone = not document and self._owners[index + 1 : index + 2] != [row]
        return f"row {row}" if alone else f"row {row}, document {document}"


def cut_at_positions(position_ids: Sequence[int]) -> list[int]:
    """Lengths of the documents of a padding-free row: one begins wherever positions begin at 0.

    >>> cut_at_positions([0, 1, 2, 0, 1, 0])
    [3, 2, 1]

    Raises:
        DataError: positions that neither begin at 0 nor go on by one, which no sample has.
    """
    positions = np.asarray(position_ids, dtype=np.int64)
    if positions.ndim != 1:
        raise DataError(
            f"position_ids have {positions.ndim} axes in a row",
            "A row of text has one; those of images are made from the sample.",
        )
    begins = np.flatnonzero(positions == 0)
    lengths = np.diff(np.append(begins, len(positions)))
    counted = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else lengths
    if not np.array_equal(counted, positions):
        raise DataError(
            "position_ids of a row do not count from 0 within each document",
            "Leave them out, or let every document begin at 0.",
        )
    return [int(n) for n in lengths]


def cut_at_cu_seq_lens(cu_seq_lens: Sequence[int], tokens: int) -> list[int]:
    """Lengths of the documents of a row from their cumulative lengths.

    >>> cut_at_cu_seq_lens([0, 3, 3, 5], 5)
    [3, 0, 2]

    Raises:
        DataError: they do not begin at 0, fall, or end elsewhere than the row.
    """
    bounds = np.asarray(cu_seq_lens, dtype=np.int64).reshape(-1)
    lengths = np.diff(bounds)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or (lengths < 0).any():
        raise DataError(
            f"cu_seq_lens {bounds.tolist()} do not divide {tokens} tokens",
            "They begin with 0, ascend, and end with the length of the row.",
        )
    return [int(n) for n in lengths]


def _documents(rows: Any) -> Iterator[list[int]]:
    """Tokens of every document of every row."""
    columns = getattr(rows, "column_names", None)
    if columns is not None and "input_ids" in columns:
        bounds = [c for c in ("seq_lengths", "position_ids", "cu_seq_lens_q", "cu_seq_lens") if c in columns]
        counted = "attention_mask" if "attention_mask" in columns else "input_ids"
        rows = rows.select_columns(list({"input_ids", counted}) + bounds[:1])
        if not bounds or bounds[0] == "seq_lengths":
            for index, (tokens, lengths) in enumerate(_arrow_lengths(rows, counted, *bounds[:1])):
                yield _checked(index, tokens, [tokens] if lengths is None else lengths)
            return
    for index in range(len(rows)):
        yield _documents_of(rows[index], index)


def _documents_of(row: Any, index: int) -> list[int]:
    if "input_ids" not in row:
        raise DataError(
            f"row {index} has no input_ids; it has: {', '.join(row)}",
            "Tokenize the data set before, or use a trainer that does.",
        )
    tokens = _unpadded(row)
    if row.get("seq_lengths") is not None:
        lengths = [int(n) for n in row["seq_lengths"]]
    elif row.get("position_ids") is not None:
        lengths = cut_at_positions(row["position_ids"])
    elif (cu := row.get("cu_seq_lens_q", row.get("cu_seq_lens"))) is not None:
        lengths = cut_at_cu_seq_lens(cu, tokens)
    else:
        lengths = [tokens]
    return _checked(index, tokens, lengths)


def _checked(index: int, tokens: int, lengths: list[int]) -> list[int]:
    if sum(lengths) != tokens:
        raise DataError(
            f"row {index} holds {tokens} tokens and documents of {sum(lengths)}", "Pack the data set again."
        )
    return lengths


def _unpadded(row: Any) -> int:
    """Tokens of a row; padding, which its mask leaves out, is of no document."""
    mask = row.get("attention_mask")
    return len(row["input_ids"]) if mask is None else int(np.count_nonzero(np.asarray(mask)))


def _arrow_lengths(
    rows: Any, counted: str, packed: str | None = None
) -> Iterator[tuple[int, list[int] | None]]:
    """Tokens of every row by one of its columns, and the lengths of its documents where a column has them."""
    import pyarrow.compute

    for table in rows.with_format("arrow").iter(batch_size=10_000):
        column = table.column(counted)
        tokens = pyarrow.compute.list_value_length(column).to_pylist()
        if counted == "attention_mask":
            owners = pyarrow.compute.list_parent_indices(column).to_numpy()
            kept = pyarrow.compute.list_flatten(column).to_numpy() != 0
            tokens = np.bincount(owners[kept], minlength=len(tokens)).tolist()
        lengths = [None] * len(tokens) if packed is None else table.column(packed).to_pylist()
        yield from zip(tokens, lengths, strict=True)


def _refuse_unknown(batch: Any) -> None:
    unknown = sorted(set(batch) - _UNDERSTOOD)
    if unknown:
        raise UnsupportedError(
            f"the collator gives {', '.join(unknown)}, which would not reach the model",
            "Use a collator of plain text; samples with images go through flexcp.Engine.",
        )


def _flat(values: Any) -> Lengths:
    """[1, T] or [T], a tensor or lists, as int64 [T]."""
    return np.asarray(values, dtype=np.int64).reshape(-1)
