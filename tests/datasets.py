"""Random training data of given lengths; no model library is needed for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

VOCAB = 97


class ListDataset:
    """Random samples of given lengths; sample 1 has no label at all, the others lose an uneven share."""

    def __init__(self, lengths: Sequence[int], seed: int = 0, unlabelled: Sequence[int] = (1,)) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        generator = np.random.default_rng(seed)
        self._examples = []
        for index, length in enumerate(lengths):
            ids = generator.integers(0, VOCAB, length)
            labels = np.where(generator.random(length) < (index % 4) / 5, -100, ids)
            if index in unlabelled:
                labels[:] = -100
            self._examples.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._examples[index]
