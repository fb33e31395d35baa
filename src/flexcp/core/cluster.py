"""What the samples run on: how many ranks, how they sit in nodes, how many tokens one rank may hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flexcp.core.errors import ConfigError

# Far above any cluster; beyond it a slip of the keyboard would be planned for hours.
MOST_RANKS, MOST_TOKENS_PER_RANK = 1 << 17, 1 << 40


@dataclass(frozen=True, slots=True)
class Cluster:
    """N ranks in nodes of equal size; one rank is one TP x PP cell.

    Attributes:
        ranks: N, 1 to `MOST_RANKS`.
        tokens_per_rank: E as tokens, the most that one rank may hold at a time (see `cost.memory`).
        ranks_per_node: ranks that share the fast links; the last node may be smaller.
        speeds: speed of each rank, 1 being what the cost model says; empty where all run at 1. A group
            runs at the speed of its slowest rank.
    """

    ranks: int
    tokens_per_rank: int
    ranks_per_node: int = 8
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens_per_rank", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", f"{name} is at least 1.")
        if self.ranks > MOST_RANKS:
            raise ConfigError(f"{self.ranks:,} ranks", f"Plans are made for up to {MOST_RANKS:,} ranks.")
        if self.tokens_per_rank > MOST_TOKENS_PER_RANK:
            raise ConfigError(f"{self.tokens_per_rank:,} tokens per rank", "No rank holds so many.")
        object.__setattr__(self, "speeds", tuple(self.speeds))  # JSON hands over a list
        if self.speeds and len(self.speeds) != self.ranks:
            raise ConfigError(f"{len(self.speeds)} speeds for {self.ranks} ranks", "Give one for each rank.")
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigError(f"speeds are {self.speeds}", "Speeds are positive numbers.")

    @property
    def capacity_tokens(self) -> int:
        """Tokens that all ranks together can hold at a time."""
        return self.ranks * self.tokens_per_rank

    def min_degree(self, tokens: int) -> int:
        """d_min: the least number of ranks that hold `tokens`, in whole-number arithmetic.

        >>> Cluster(64, 8192).min_degree(131072), Cluster(64, 8192).min_degree(131073)
        (16, 17)
        """
        return -(-tokens // self.tokens_per_rank)

    def speed(self, ranks: Iterable[int]) -> float:
        """Speed of a group: that of its slowest rank.

        >>> Cluster(2, 8192, speeds=(1.0, 0.5)).speed((0, 1))
        0.5
        """
        return min((self.speeds[rank] for rank in ranks), default=1.0) if self.speeds else 1.0

    @property
    def top_speed(self) -> float:
        """Speed of the fastest rank."""
        return max(self.speeds, default=1.0)

    def with_top_speed_one(self) -> Cluster:
        """Speeds relative to the fastest rank; none where all are alike.

        >>> Cluster(2, 8192, speeds=(2.0, 1.0)).with_top_speed_one().speeds
        (1.0, 0.5)
        """
        top = self.top_speed
        alike = all(speed == top for speed in self.speeds)
        return replace(self, speeds=() if alike else tuple(speed / top for speed in self.speeds))

    @property
    def rank_equivalents(self) -> float:
        """All ranks counted in ranks of the top speed; N where all are alike."""
        return math.fsum(self.speeds) / self.top_speed if self.speeds else float(self.ranks)

    def node_of(self, rank: int) -> int:
        """Node that `rank` sits in."""
        return rank // self.ranks_per_node
