"""Megatron's indexed datasets as training data: one sample a document, read by megatron-core's own class."""

from __future__ import annotations

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from numpy.typing import NDArray

from flexcp.core.errors import DataError
from flexcp.runtime.batches import Example


class IndexedDocuments:
    """The documents of a `.idx`/`.bin` pair; every token is supervised.

    Args:
        path_prefix: path without `.idx` or `.bin`, as in `--data-path`.
        max_tokens: longer documents are cut into samples of at most so many tokens; None leaves them whole.

    Raises:
        DataError: a file is missing, or no document has a token.
    """

    def __init__(self, path_prefix: str, *, max_tokens: int | None = None) -> None:
        if not IndexedDataset.exists(path_prefix):
            raise DataError(
                f"{path_prefix}.idx or {path_prefix}.bin does not exist",
                "Give the path without the suffix, as in --data-path.",
            )
        if max_tokens is not None and max_tokens < 1:
            raise DataError(f"max_tokens is {max_tokens}", "A sample has at least one token.")
        self.path_prefix = path_prefix
        self._indexed = IndexedDataset(path_prefix)
        bounds = np.concatenate([[0], np.cumsum(self._indexed.sequence_lengths, dtype=np.int64)])
        bounds = bounds[self._indexed.document_indices]
        documents = np.diff(bounds)
        most = max_tokens or max(int(documents.max(initial=1)), 1)
        parts = -(-documents // most)
        self._document = np.repeat(np.arange(len(documents)), parts)
        first = np.repeat(np.cumsum(parts) - parts, parts)
        self._start = (np.arange(len(self._document)) - first) * most
        self.lengths: NDArray[np.int64] = np.minimum(most, documents[self._document] - self._start)
        if not len(self.lengths):
            raise DataError(f"{path_prefix} holds no token", "Give at least one document.")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        """`input_ids` of one sample."""
        at, left = int(self._start[index]), int(self.lengths[index])
        first, last = self._indexed.document_indices[self._document[index] :][:2]
        parts = []
        for sequence in range(int(first), int(last)):
            tokens = int(self._indexed.sequence_lengths[sequence])
            if left and at < tokens:
                length = min(left, tokens - at)
                parts.append(self._indexed.get(sequence, offset=at, length=length))
                left, at = left - length, at + length
            at -= tokens
        return {"input_ids": np.concatenate(parts)}

    def name(self, index: int) -> str:
        """What to call a sample in messages."""
        return f"document {self._document[index]} of {self.path_prefix} from token {self._start[index]} on"
