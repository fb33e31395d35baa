"""Which samples make up step k: a function of seed and step alone, the same for any N and any policy.

Stateless, so a resumed run needs only its step. It knows nothing of ranks: sharing a batch out is planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import CheckpointError, ConfigError

Indices = npt.NDArray[np.int64]


@lru_cache(maxsize=2)  # neighbouring steps share an epoch
def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Permutation of all samples for one epoch.

    Sorts raw PCG64 draws: NumPy keeps raw bit streams stable across versions, and promises no such thing
    for `Generator.permutation`, so a resumed run must not lean on that.

    Returns:
        int64 [num_samples], read-only (it is cached).

    >>> sorted(epoch_order(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    _at_least("num_samples", num_samples, 1)
    _at_least("seed", seed, 0)
    _at_least("epoch", epoch, 0)
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_samples)
    order = np.argsort(draws, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def batch_indices(num_samples: int, global_batch: int, seed: int, step: int) -> Indices:
    """Samples of one step: the step-th slice of all epochs laid end to end.

    Each epoch visits every sample exactly once; a batch may span epochs, and may exceed the data set.

    Returns:
        int64 [global_batch], indices into the data set.

    Raises:
        ConfigError: a count below 1, or a negative seed or step.

    >>> [len(batch_indices(7, 3, seed=0, step=step)) for step in range(3)]
    [3, 3, 3]
    """
    _at_least("num_samples", num_samples, 1)
    _at_least("global_batch", global_batch, 1)
    _at_least("step", step, 0)
    start = step * global_batch
    stop = start + global_batch
    parts = []
    while start < stop:
        epoch, offset = divmod(start, num_samples)
        taken = min(num_samples - offset, stop - start)
        parts.append(epoch_order(num_samples, seed, epoch)[offset : offset + taken])
        start += taken
    return np.concatenate(parts)


def require_same_order(state: Mapping[str, Any], **this_run: int | str) -> None:
    """Refuse a state that was left by a run with other samples in its steps.

    Raises:
        ConfigError: one of the given values differs; it is named.
    """
    for key, value in this_run.items():
        if state.get(key) != value:
            raise ConfigError(
                f"the checkpoint was made with {key} = {state.get(key)}, this run has {value}",
                "Resume with the same value, or start a new run.",
            )


def count_of(state: Mapping[str, Any], key: str) -> int:
    """A count that a run left.

    Raises:
        CheckpointError: it is none, so something else has written it.
    """
    count = state.get(key)
    if type(count) is not int or count < 0:
        raise CheckpointError(
            f"the state to go on from is damaged: its {key} is {count!r}", "Resume from another checkpoint."
        )
    return count


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}", f"{name} is at least {least}.")
