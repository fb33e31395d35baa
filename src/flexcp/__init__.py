"""Flexible context parallelism: any-integer degrees, chosen anew for every global batch.

Everything a user needs is here; names that are not in `__all__` may change. Importing this never imports
torch: what needs it is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flexcp.core import images
from flexcp.core.cluster import Cluster
from flexcp.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DisagreementError,
    FlexCPError,
    InfeasibleError,
    InputError,
    LengthsError,
    LossError,
    MissingExtraError,
    PlanError,
    RankFailedError,
    RankLostError,
    RunError,
    SampleTooLongError,
    UnknownNameError,
    UnsupportedError,
)
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.cost import cost_model, hardware, tokens_per_rank
from flexcp.cost.encoder import image_sample
from flexcp.planner import Planner, make_plan

if TYPE_CHECKING:
    from flexcp.attention import group_attention
    from flexcp.core.metrics import StepReport
    from flexcp.integrations import megatron, transformers
    from flexcp.runtime.batches import MicroBatch
    from flexcp.runtime.engine import Engine
    from flexcp.runtime.launch import World, launch
    from flexcp.runtime.sharding import shard
    from flexcp.runtime.step import Step

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "DataError",
    "DisagreementError",
    "Engine",
    "FlexCPError",
    "InfeasibleError",
    "InputError",
    "LengthsError",
    "LossError",
    "MicroBatch",
    "MissingExtraError",
    "ModelShape",
    "Plan",
    "PlanError",
    "Planner",
    "RankFailedError",
    "RankLostError",
    "RunError",
    "Sample",
    "SampleTooLongError",
    "Step",
    "StepReport",
    "Task",
    "UnknownNameError",
    "UnsupportedError",
    "World",
    "__version__",
    "cost_model",
    "group_attention",
    "hardware",
    "image_sample",
    "images",
    "launch",
    "make_plan",
    "megatron",
    "model_shape",
    "samples_from_lengths",
    "shard",
    "tokens_per_rank",
    "transformers",
]

# Name -> the module that holds it; what needs an extra.
_LAZY = {
    "Engine": "flexcp.runtime.engine",
    "MicroBatch": "flexcp.runtime.batches",
    "Step": "flexcp.runtime.step",
    "StepReport": "flexcp.core.metrics",
    "World": "flexcp.runtime.launch",
    "launch": "flexcp.runtime.launch",
    "group_attention": "flexcp.attention",
    "shard": "flexcp.runtime.sharding",
    "megatron": "flexcp.integrations.megatron",
    "transformers": "flexcp.integrations.transformers",
}
# Hosts: what must be there, and the extra that brings it.
_HOSTS = {"megatron": ("megatron.core", "train,megatron"), "transformers": ("transformers", "train")}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'flexcp' has no attribute {name!r}")
    host, extra = _HOSTS.get(name, ("torch", "train"))
    for needed in ("torch", host):
        try:
            importlib.import_module(needed)  # by itself, so that only its absence is blamed on the extra
        except ModuleNotFoundError as error:
            raise MissingExtraError(error.name or needed, extra) from error
    module = importlib.import_module(_LAZY[name])
    return module if name in _HOSTS else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
