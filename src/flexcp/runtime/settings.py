"""The arguments of an engine: whether they can serve, and as text, since no plan fits all if they differ."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flexcp.core.errors import ConfigError
from flexcp.planner import Planner
from flexcp.runtime.agreement import versions
from flexcp.runtime.batches import Dataset, Stream, check_fits
from flexcp.runtime.planning import AnyPlanner
from flexcp.runtime.sharding import Replicated, weights_checksum

if TYPE_CHECKING:
    from flexcp.runtime.engine import Engine


def require_fitting(planner: AnyPlanner, dataset: Dataset | Stream, global_batch: int) -> None:
    """Refuse a planner of another number of ranks, and data that its cluster cannot hold.

    Raises:
        ConfigError: planner and world disagree, or there is no sample a step.
        SampleTooLongError: a sample does not fit.
        DataError: there is none.
    """
    cluster = planner.cluster
    if cluster.ranks != dist.get_world_size():
        raise ConfigError(
            f"the planner plans for {cluster.ranks} ranks, the world has {dist.get_world_size()}",
            "Make the planner's Cluster with ranks=dist.get_world_size().",
        )
    check_fits(dataset, cluster, global_batch)


def require_options(clip_norm: float | None, on_bad_loss: str) -> None:
    """Refuse what no step can heed.

    Raises:
        ConfigError: of either.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ConfigError(f"clip_norm is {clip_norm}", "It is above 0, or None to leave gradients alone.")
    if on_bad_loss not in ("stop", "skip"):
        raise ConfigError(f"on_bad_loss is {on_bad_loss!r}", 'Give "stop" or "skip".')


def require_own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sharding replaces parameters: an optimizer made before it would step tensors that nobody trains.

    Raises:
        ConfigError: it holds such.
    """
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "the optimizer holds parameters that are not the model's",
            "Make the optimizer after flexcp.shard(model, …).",
        )


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
