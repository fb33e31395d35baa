"""How the ring talks to its neighbours: one call that starts messages, one that waits for them.

A protocol only. The transport of a training run and the in-process one of the tests both fulfil it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when every tensor received is filled and every tensor sent may be reused."""
        ...


class Exchange(Protocol):
    """The group as one of its members sees it; members are numbered 0..degree-1 in ring order.

    Attributes:
        member: which member this is.
        degree: number of members.
    """

    member: int
    degree: int

    def post(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Pending:
        """Start all sends and receives, each a contiguous tensor of at least one row and the other member.

        The tensors must live, and stay untouched, until `wait` returns. There are no tags: between two
        members, the k-th tensor sent is the k-th tensor received.
        """
        ...
