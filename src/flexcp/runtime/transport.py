"""Neighbour messages over torch.distributed: one process group for all rings, made once.

Groups are data, not communicators: a ring is a list of global ranks, and its messages are point-to-point
sends inside the one parent group. Only `batch_isend_irecv` is used, because on NCCL a bare isend makes a
communicator per pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from flexcp.core.errors import RankFailedError
from flexcp.runtime.launch import DEFAULT_TIMEOUT_S


class Transport:
    """The parent group of every ring of this process.

    It is a group of its own, so that on NCCL ring traffic neither queues behind gradient reductions nor
    has to be issued in their order. All ranks must construct it at the same point; the first collective
    on it (a barrier) happens here, since on NCCL subsets may only talk once the communicator exists.

    Args:
        timeout_s: a ring message that takes longer ends with an error (where the backend heeds it).
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        dist.barrier(self.group)

    def exchange(self, ranks: Sequence[int]) -> GroupExchange:
        """Messages among `ranks` (global, in ring order), as seen from this rank, which is one of them."""
        return GroupExchange(self, tuple(ranks))


class GroupExchange:
    """Implements `attention.exchange.Exchange` for one group."""

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        self._transport = transport
        self._ranks = ranks
        self.member = ranks.index(transport.rank)
        self.degree = len(ranks)

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> PendingWorks:
        """Start all messages; tensors must stay untouched until `wait`."""
        group = self._transport.group
        ops = [dist.P2POp(dist.isend, t, self._ranks[member], group) for t, member in sends]
        ops += [dist.P2POp(dist.irecv, t, self._ranks[member], group) for t, member in receives]
        if not ops:
            return PendingWorks([], self._ranks)
        try:
            return PendingWorks(dist.batch_isend_irecv(ops), self._ranks)
        except RuntimeError as error:
            raise _peer_lost(self._ranks, error) from error


class PendingWorks:
    """Messages under way; NCCL gives one work for all of them, gloo one each."""

    def __init__(self, works: list[dist.Work], ranks: tuple[int, ...]) -> None:
        self._works = works
        self._ranks = ranks

    def wait(self) -> None:
        """Until every message has been sent or has arrived.

        Raises:
            RankFailedError: a peer closed the connection or did not answer in time.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _peer_lost(self._ranks, error) from error


def _peer_lost(ranks: tuple[int, ...], error: RuntimeError) -> RankFailedError:
    return RankFailedError(
        f"a ring exchange among ranks {list(ranks)} failed: {str(error).splitlines()[0]}",
        "Another rank has ended or stalled; its own output says why.",
    )
