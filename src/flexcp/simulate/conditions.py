"""What a simulated run meets that its plans do not know of; by default nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError
from flexcp.core.plan import Mode

# What is beyond is no day of a machine, and times would leave the range of numbers.
_MOST = {"jitter": 2.0, "reduce_s": 1e15, "wave_s": 1e15, "optimizer_s": 1e6, "plan_s": 1e6, "data_s": 1e6}
_SLOWEST = 1e-3


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that dies so many seconds into the run."""

    rank: int
    at_s: float


@dataclass(frozen=True)
class Conditions:
    """The machine and its day. With the defaults a step takes what its plan predicts.

    Up to the rounding of sums, that is: planner and simulator add samples in different orders.

    Attributes:
        jitter: spread of the time that a rank takes for its part of a task: log-normal, mean 1, drawn anew
            for each task and member. A group goes at the pace of its slowest member.
        seed: of the jitter.
        speeds: real speed of single ranks by rank, in place of what the plan's cluster says.
        failure: a rank that dies.
        uplinks: links that leave a node, each of the bandwidth between nodes; unset: as many as needed.
            Rings that leave the same node share them, see `simulate.sharing`.
        cores: processor cores that the ranks of one node share, each rank at most one; unset: as many as
            needed. Times of the cost model are then core-seconds.
        reduce_s: time of the gradient reduction, see `simulate.reduction`.
        reduce_overlap: layers are reduced while the last backward still runs, and collectives of a wave
            hide behind its tasks.
        wave_s: collectives of every wave, for plans in lockstep; see `simulate.reduction.collectives`.
        optimizer_s: time of the optimizer step.
        plan_s, data_s: time to plan one step, and to read its samples; both run in the background.
    """

    jitter: float = 0.0
    seed: int = 0
    speeds: Mapping[int, float] = field(default_factory=dict)
    failure: Failure | None = None
    uplinks: int | None = None
    cores: int | None = None
    reduce_s: float = 0.0
    reduce_overlap: bool = False
    wave_s: float = 0.0
    optimizer_s: float = 0.0
    plan_s: float = 0.0
    data_s: float = 0.0

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigError(
                    f"{name} is {value}", f"{name} is a number, at least 0 and at most {most:g}."
                )
        for name in ("uplinks", "cores"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", f"{name} is at least 1; leave it out for no limit.")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}", "seed is at least 0.")
        for rank, speed in self.speeds.items():
            if not _SLOWEST <= speed <= 1 / _SLOWEST:
                raise ConfigError(
                    f"the speed of rank {rank} is {speed}",
                    f"Speeds lie between {_SLOWEST:g} and {1 / _SLOWEST:g}; 1 is as planned.",
                )
        if self.failure is not None and not 0 <= self.failure.at_s < math.inf:
            raise ConfigError(
                f"rank {self.failure.rank} fails at {self.failure.at_s} s",
                "Give finite seconds from the start of the run.",
            )

    @property
    def shares(self) -> bool:
        """Whether running tasks can slow each other."""
        return self.uplinks is not None or self.cores is not None

    def require_fitting(self, cluster: Cluster, mode: Mode) -> None:
        """Refuse a cluster without all ranks that are named, and collectives in waves where there are none.

        Raises:
            ConfigError: names the first rank that does not, or the mode.
        """
        if self.wave_s and mode != "lockstep":
            raise ConfigError(
                f"wave_s is {self.wave_s}, and plans are {mode}",
                "Collectives in waves need plans in lockstep: all ranks must pass the same waves.",
            )
        named = [*self.speeds, *([self.failure.rank] if self.failure else [])]
        for rank in named:
            if not 0 <= rank < cluster.ranks:
                raise ConfigError(
                    f"there is no rank {rank} among {cluster.ranks}", f"Ranks are 0 to {cluster.ranks - 1}."
                )
