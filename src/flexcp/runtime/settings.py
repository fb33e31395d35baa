"""What an engine runs with, as text: equal on all ranks, or no plan fits all."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from flexcp.planner import Planner
from flexcp.runtime.agreement import versions
from flexcp.runtime.batches import Dataset, Stream
from flexcp.runtime.sharding import Replicated, weights_checksum

if TYPE_CHECKING:
    from flexcp.runtime.engine import Engine


def settings_of(engine: Engine) -> dict[str, str]:
    """By name, in a fixed order."""
    planner = engine.planner
    # Nothing makes replicas equal later; of shards every rank has its own.
    replicated = isinstance(engine.sharding, Replicated)
    return {
        **versions(),
        # A planner of the user's own may print its address.
        "planner": repr(planner if isinstance(planner, Planner) else planner.cluster),
        "lengths of the data set": lengths_hash(engine.dataset),
        "global_batch": str(engine.global_batch),
        "number of steps": str(engine.steps),
        "seed": str(engine.seed),
        "clip_norm": str(engine.clip_norm),
        "on_bad_loss": engine.on_bad_loss,
        "learn_costs": str(engine.learn_costs),
        "parameter shapes": str([tuple(parameter.shape) for parameter in engine.model.parameters()]),
        "weights of the model": weights_checksum(engine.model) if replicated else "in shards",
    }


def data_name(dataset: Dataset | Stream) -> str:
    """What tells one data set from another in a checkpoint; of a stream nothing is known.

    >>> class Two:
    ...     lengths = (5, 9)
    >>> data_name(Two())
    '2 samples of 14 tokens (lengths 5f880f05)'
    """
    if isinstance(dataset, Stream):
        return "a stream"
    tokens = int(np.sum(dataset.lengths, dtype=np.int64))
    return f"{len(dataset.lengths)} samples of {tokens} tokens (lengths {lengths_hash(dataset)[:8]})"


def lengths_hash(dataset: Dataset | Stream) -> str:
    """Of all lengths; those of a stream are not known."""
    lengths = [] if isinstance(dataset, Stream) else dataset.lengths
    return hashlib.sha256(np.ascontiguousarray(lengths, dtype="<i8").tobytes()).hexdigest()
