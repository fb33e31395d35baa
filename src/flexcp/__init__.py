"""Flexible context parallelism: any-integer degrees, chosen anew for every global batch.

Everything a user needs is here; names that are not in `__all__` may change. Importing this never imports
torch: `Engine` is loaded when it is first asked for.
"""

from __future__ import annotations

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
    from flexcp.runtime.engine import Engine

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
    "make_plan",
    "model_shape",
    "samples_from_lengths",
]


def __getattr__(name: str) -> object:
    if name != "Engine":
        raise AttributeError(f"module 'flexcp' has no attribute {name!r}")
    try:
        import torch  # noqa: F401 (asked for by itself, so that only its absence is blamed on the extra)
    except ModuleNotFoundError as error:
        raise MissingExtraError("torch", "train") from error
    from flexcp.runtime.engine import Engine

    return Engine


def __dir__() -> list[str]:
    return __all__
