"""One rank that works as a member of a ring of many, with nobody to talk to: all but links can be measured.

What a member computes in a group of any degree can be timed on one device. Messages come from its own
buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.attention.exchange import FORTH, Buffers, Message
from flexcp.core.plan import ExchangeKind

RANKS = 8  # the widest group that a rank alone pretends to be in


class _Arrived:
    def wait(self) -> None:
        """Nothing is under way."""


class _AloneExchange:
    """Member 0 of a group whose other members are not there; see `attention.exchange.Exchange`."""

    def __init__(self, degree: int, kind: ExchangeKind, buffers: Buffers) -> None:
        self.member, self.degree = 0, degree
        self.kind: ExchangeKind = kind
        self.buffers = buffers
        self.waits: list[tuple[float, float]] = []

    def post(
        self,
        sends: Sequence[tuple[Message, int]],
        receives: Sequence[tuple[Message, int]],
        lane: int = FORTH,
    ) -> _Arrived:
        """What is received is what is sent, as far as it goes: finite numbers, one copy on the device."""
        for index, (message, _) in enumerate(receives):
            arriving = message.payload.view(-1)
            sent = sends[index % len(sends)][0].payload.view(-1)[: len(arriving)] if sends else arriving[:0]
            arriving[: len(sent)].copy_(sent)
            arriving[len(sent) :].zero_()
        return _Arrived()


class AloneTransport:
    """Stands where `runtime.transport.Transport` stands, for one process without a world."""

    def __init__(self) -> None:
        self.rank = 0
        self.buffers = Buffers()

    def exchange(self, ranks: Sequence[int], kind: ExchangeKind = "ring") -> _AloneExchange:
        """The group as rank 0 sees it, which is its first member."""
        return _AloneExchange(len(ranks), kind, self.buffers)
