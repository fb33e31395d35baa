"""What the samples run on: how many ranks, how they sit in nodes, how many tokens one rank may hold."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cluster:
    """N ranks in nodes of equal size; one rank is one TP x PP cell.

    Attributes:
        ranks: N, at least 1.
        tokens_per_rank: E as tokens, the most that one rank may hold at a time (see `cost.memory`).
        ranks_per_node: ranks that share the fast links; the last node may be smaller.
    """

    ranks: int
    tokens_per_rank: int
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens_per_rank", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", f"{name} is at least 1.")

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

    def node_of(self, rank: int) -> int:
        """Node that `rank` sits in."""
        return rank // self.ranks_per_node
