"""Tokens that a model does not know, found before it runs: on an accelerator a kernel would fail."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flexcp.core.errors import DataError
from flexcp.runtime.batches import Dataset, MicroBatch, Stream, sample_name


def foreign_tokens(
    model: nn.Module, micro_batches: Sequence[MicroBatch], dataset: Dataset | Stream
) -> DataError | None:
    """Why a model cannot run these; None if it can, or does not say how many tokens it knows.

    Args:
        model: transformers' models say it, and may be wrapped by `DistributedDataParallel`.
        micro_batches: still on the host.
        dataset: whose samples they are.
    """
    known = _rows(model)
    if known is None:
        return None
    for micro in micro_batches:
        highest = max(int(micro.inputs["input_ids"].max()), int(micro.labels.max()))
        if highest >= known:
            names = ", ".join(sample_name(dataset, index) for index in micro.sample_ids)
            return DataError(
                f"token {highest} occurs in {names}; the model knows {known} tokens",
                "Use the tokenizer that belongs to the model.",
            )
    return None


def _rows(model: nn.Module) -> int | None:
    """Of the table of embeddings."""
    find = getattr(getattr(model, "module", model), "get_input_embeddings", None)
    try:
        rows = getattr(find(), "num_embeddings", None) if callable(find) else None
    except NotImplementedError:  # transformers, of a model without one
        return None
    return rows if isinstance(rows, int) else None
