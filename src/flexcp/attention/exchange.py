"""How members of a group talk: one call that starts messages, one that waits for them, and what a message is.

A protocol only. The transport of a training run and the in-process one of the tests both fulfil it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flexcp.core.plan import ExchangeKind

# Keys and values travel in one lane and the gradients that return in another, so neither waits for the other.
FORTH, BACK = 0, 1

# A batch of more than 256 messages was reported to hang on NCCL; bytes bound what is staged at once.
_MOST_ROUNDS = 32  # a send and a receive each
_MOST_BYTES = 256 * 2**20
_HEAD_BYTES = 64  # a multiple of every element size, and what memory is aligned to


class Message:
    """A contiguous tensor with room in front for a word that says how long it is.

    gloo fills a long buffer from a short message without a word, so the sender's length travels along.

    Attributes:
        payload: what is sent or received.
    """

    def __init__(self, flat: Tensor, shape: Sequence[int]) -> None:
        self._flat = flat
        self._head = _HEAD_BYTES // flat.element_size()
        self.payload = flat[self._head : self._head + math.prod(shape)].view(*shape)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Message:
        """A message of its own storage."""
        size = _HEAD_BYTES // dtype.itemsize + math.prod(shape)
        return cls(torch.zeros(size, dtype=dtype, device=device), shape)

    @property
    def whole(self) -> Tensor:
        """Word and payload: what really travels."""
        return self._flat[: self._head + self.payload.numel()]

    @property
    def payload_bytes(self) -> int:
        """Length that the receiver expects."""
        return self.payload.numel() * self.payload.element_size()

    @property
    def length(self) -> Tensor:
        """The word, int64 [1]."""
        return self._flat[: self._head].view(torch.int64)[:1]


class Buffers:
    """Messages by name, in storage that is used again and only grows.

    A name is one message at a time: who takes it again must be done with what it held.

    Attributes:
        allocations: times that storage was made.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.allocations = 0

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Message:
        """A message of this shape; what is in it is undefined."""
        size = _HEAD_BYTES // dtype.itemsize + math.prod(shape)
        key = (name, dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = torch.empty(size, dtype=dtype, device=device)
            self.allocations += 1
        return Message(flat, shape)


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when every message received is filled and every message sent may be reused."""
        ...


class Exchange(Protocol):
    """The group as one of its members sees it; members are numbered 0..degree-1 in ring order.

    Attributes:
        member: which member this is.
        degree: number of members.
        kind: how attention uses it.
        buffers: messages to use; the same on every call.
    """

    member: int
    degree: int
    kind: ExchangeKind
    buffers: Buffers

    def post(
        self,
        sends: Sequence[tuple[Message, int]],
        receives: Sequence[tuple[Message, int]],
        lane: int = FORTH,
    ) -> Pending:
        """Start all sends and receives, each a message of at least one row and the other member.

        Messages must stay untouched until `wait` returns. There are no names: between two members, the k-th
        message sent in a lane is the k-th received in it; and both post messages of all lanes in one order.
        """
        ...


class Swap:
    """Messages between all pairs of a group, in rounds, a bounded number of them at a time.

    In round r a member sends to the r-th after it and receives from the r-th before it. Rounds come in one
    order everywhere, so nobody waits in a circle. The first batch is under way when this returns.

    Args:
        exchange: the group.
        outgoing: messages by the member that gets them; none where there is nothing to say.
        incoming: messages by the member that sends them.
        largest_bytes: of any message in the group, so that all make the same batches.
        lane: see `Exchange.post`.
    """

    def __init__(
        self,
        exchange: Exchange,
        outgoing: Mapping[int, Message],
        incoming: Mapping[int, Message],
        largest_bytes: int,
        lane: int = FORTH,
    ) -> None:
        self._exchange, self._outgoing, self._incoming, self._lane = exchange, outgoing, incoming, lane
        size = max(1, min(_MOST_ROUNDS, _MOST_BYTES // max(1, 2 * largest_bytes)))
        rounds = range(1, exchange.degree)
        self._batches = [rounds[start : start + size] for start in range(0, len(rounds), size)]
        self._pending = self._post_next()

    def _post_next(self) -> Pending | None:
        exchange = self._exchange
        while self._batches:
            batch = self._batches.pop(0)
            targets = [(exchange.member + number) % exchange.degree for number in batch]
            sources = [(exchange.member - number) % exchange.degree for number in batch]
            sends = [(self._outgoing[target], target) for target in targets if target in self._outgoing]
            receives = [(self._incoming[source], source) for source in sources if source in self._incoming]
            if sends or receives:
                return exchange.post(sends, receives, self._lane)
        return None

    def wait(self) -> None:
        """Return when all batches are complete."""
        while self._pending:
            self._pending.wait()
            self._pending = self._post_next()


def group_sum(mine: Tensor, exchange: Exchange) -> Tensor:
    """Sum of a small tensor over the members of a group, who all call it; the same bits on every member.

    Args:
        mine: any shape, the same on all members; no gradient flows.
        exchange: the group.
    """
    if exchange.degree == 1:
        return mine
    members = range(exchange.degree)
    messages = {
        member: exchange.buffers.take(f"sum {member}", mine.shape, mine.dtype, mine.device)
        for member in members
    }
    own = messages.pop(exchange.member)
    own.payload.copy_(mine)
    Swap(exchange, dict.fromkeys(messages, own), messages, own.payload_bytes).wait()
    messages[exchange.member] = own
    return torch.stack([messages[member].payload for member in members]).sum(0)
