"""Tokens that a model does not know, found before it runs: on an accelerator a kernel would fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from flexcp.core.errors import DataError
from flexcp.runtime.batches import Dataset, MicroBatch, Stream, sample_name


def inspection(model: nn.Module, dataset: Dataset | Stream) -> Callable[[Sequence[MicroBatch]], None] | None:
    """What looks for such tokens in the background; None where the model does not say how many it knows.

    Args:
        model: transformers' models say it, and may be wrapped by `DistributedDataParallel`.
        dataset: whose samples the micro-batches are.
    """
    known = _rows(model)
    return None if known is None else partial(_require_known, known, dataset)


def _rows(model: nn.Module) -> int | None:
    """Of the table of embeddings."""
    find = getattr(getattr(model, "module", model), "get_input_embeddings", None)
    try:
        rows = getattr(find(), "num_embeddings", None) if callable(find) else None
    except NotImplementedError:  # transformers, of a model without one
        return None
    return rows if isinstance(rows, int) else None


def _require_known(known: int, dataset: Dataset | Stream, micro_batches: Sequence[MicroBatch]) -> None:
    """Raises DataError, which names token and samples; the micro-batches are on the host."""
    for micro in micro_batches:
        highest = max(int(micro.inputs["input_ids"].max()), int(micro.labels.max()))
        if highest >= known:
            names = ", ".join(sample_name(dataset, index) for index in micro.sample_ids)
            raise DataError(
                f"token {highest} occurs in {names}; the model knows {known} tokens",
                "Use the tokenizer that belongs to the model.",
            )
