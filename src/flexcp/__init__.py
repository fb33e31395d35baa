"""Flexible context parallelism: any-integer degrees, chosen anew for every global batch.

Everything a user needs is here; names that are not in `__all__` may change. Importing this never imports
torch: `Engine`, `launch`, `shard` and `transformers` are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    MissingExtraError,
    PlanError,
    RankFailedError,
    RunError,
    SampleTooLongError,
    TransportError,
    UnknownNameError,
    UnsupportedError,
)
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.planner import Planner, make_plan

if TYPE_CHECKING:
    from flexcp.integrations import transformers
    from flexcp.runtime.engine import Engine
    from flexcp.runtime.launch import launch
    from flexcp.runtime.sharding import shard

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
    "MissingExtraError",
    "ModelShape",
    "Plan",
    "PlanError",
    "Planner",
    "RankFailedError",
    "RunError",
    "Sample",
    "SampleTooLongError",
    "Task",
    "TransportError",
    "UnknownNameError",
    "UnsupportedError",
    "__version__",
    "launch",
    "make_plan",
    "model_shape",
    "samples_from_lengths",
    "shard",
    "transformers",
]

# Name -> module, and attribute of it; what needs the extra [train].
_LAZY = {
    "Engine": ("flexcp.runtime.engine", "Engine"),
    "launch": ("flexcp.runtime.launch", "launch"),
    "shard": ("flexcp.runtime.sharding", "shard"),
    "transformers": ("flexcp.integrations.transformers", ""),
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'flexcp' has no attribute {name!r}")
    path, attribute = _LAZY[name]
    try:
        # Asked for by themselves, so that only their absence is blamed on the extra.
        importlib.import_module("torch")
        if not attribute:
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    module = importlib.import_module(path)
    return getattr(module, attribute) if attribute else module


def __dir__() -> list[str]:
    return __all__
