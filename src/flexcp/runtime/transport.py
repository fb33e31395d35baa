"""Messages of a group over torch.distributed: one process group for all groups of all plans, made once.

Groups are data, not communicators: a group is a list of global ranks, and its messages are point-to-point
sends inside the one parent group. Only `batch_isend_irecv` is used, because on NCCL a bare isend makes a
communicator per pair.

On an accelerator nothing here waits on the host. A communicator has a stream of its own: what is posted
starts when the work queued so far is done, travels beside what is queued behind it, and `wait` orders the
streams.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flexcp.attention.exchange import FORTH, Buffers, Message, Swap
from flexcp.core.errors import DisagreementError, RankFailedError
from flexcp.core.plan import ExchangeKind
from flexcp.runtime.collectives import collective_device
from flexcp.runtime.launch import DEFAULT_TIMEOUT_S, has_accelerators


class Transport:
    """The parent group of every group of this process, and the buffers that all of them share.

    It is a group of its own, so that on NCCL these messages neither queue behind gradient reductions nor
    have to be issued in their order. All ranks must construct it at the same point; the first collective
    on it (a barrier) happens here, since on NCCL subsets may only talk once the communicator exists. Then
    every rank greets those it will likely meet, since the first message between two ranks is slow.

    Where a rank of the plan is a TP x PP cell of several processes, messages pass between the processes that
    have the same place in their cells: a column.

    Args:
        timeout_s: a message that takes longer ends with an error (where the backend heeds it).
        ranks_per_node: ranks of one node greet each other; across nodes neighbours do. Default: all ranks.
        columns: processes by rank of the plan, one list for each place in a cell, the same lists on all
            processes. Default: every process is a rank.

    Attributes:
        rank: of the plan, that this process stands for.
        members: processes of this column, by rank of the plan.
        met: ranks that this one has greeted.
    """

    def __init__(
        self,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ranks_per_node: int | None = None,
        columns: Sequence[Sequence[int]] | None = None,
    ) -> None:
        process, timeout = dist.get_rank(), timedelta(seconds=timeout_s)
        for column in columns or [range(dist.get_world_size())]:  # all processes make all groups
            group = dist.new_group(list(column), timeout=timeout, pg_options=_options(timeout))
            if process in column:
                self.group, self.members = group, tuple(column)
        self.rank = self.members.index(process)
        self.buffers = Buffers()
        # gloo alone takes a short message without a word; NCCL waits for the rest until the timeout, and to
        # read the length there would stall the accelerator.
        self.checks_lengths = dist.get_backend(self.group) == "gloo"
        # gloo sends from the host alone: where ranks share a device, or NCCL is missing, messages pass there.
        self.stages = self.checks_lengths and has_accelerators()
        dist.barrier(self.group)
        ranks = len(self.members)
        self.met = likely_peers(self.rank, ranks, ranks_per_node or ranks)
        self._greet(range(ranks))

    def exchange(self, ranks: Sequence[int], kind: ExchangeKind = "ring") -> GroupExchange:
        """Messages among `ranks` (of the plan, in ring order), as seen from this one, which is among them."""
        return GroupExchange(self, tuple(ranks), kind)

    def on_host(self, message: Message, *, filled: bool = False) -> Message:
        """The message's place in host memory, always the same one, as large; `filled` with what it holds."""
        payload = message.payload
        name = f"host {payload.data_ptr()}"
        host = self.buffers.take(name, payload.shape, payload.dtype, torch.device("cpu"))
        if filled:
            host.payload.copy_(payload)
        return host

    def _greet(self, ranks: Sequence[int]) -> None:
        """One word to and from every likely peer, in the order of `Swap`: nobody waits in a circle."""
        device = collective_device()
        hello = {peer: Message.zeros((1,), torch.int64, device) for peer in self.met}
        heard = {peer: Message.zeros((1,), torch.int64, device) for peer in self.met}
        Swap(self.exchange(ranks), hello, heard, largest_bytes=8).wait()


def _options(timeout: timedelta) -> Any:
    """Of the group: NCCL sends from a stream that goes first. Other backends have none.

    A kernel that fills the device lets no other in before its own last blocks, unless that one has priority:
    messages would travel after the computation that they should travel beside.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch takes that of the group, and warns where they differ
    return options


def likely_peers(rank: int, ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Who a rank will likely exchange messages with: its node, and the ranks before and after it.

    >>> likely_peers(3, 8, 4), likely_peers(0, 8, 4)
    ((0, 1, 2, 4), (1, 2, 3, 7))
    """
    node = rank // ranks_per_node
    same_node = set(range(node * ranks_per_node, min(ranks, (node + 1) * ranks_per_node)))
    return tuple(sorted((same_node | {(rank + 1) % ranks, (rank - 1) % ranks}) - {rank}))


class GroupExchange:
    """Implements `attention.exchange.Exchange` for one group.

    Attributes:
        waits: when this rank began and ended to wait for messages (`time.perf_counter`). An accelerator waits
            by itself, so there these are the times of its host.
    """

    def __init__(self, transport: Transport, ranks: tuple[int, ...], kind: ExchangeKind) -> None:
        self._transport = transport
        self._ranks = ranks
        self.member = ranks.index(transport.rank)
        self.degree = len(ranks)
        self.kind: ExchangeKind = kind
        self.buffers = transport.buffers
        self.waits: list[tuple[float, float]] = []

    def post(
        self,
        sends: Sequence[tuple[Message, int]],
        receives: Sequence[tuple[Message, int]],
        lane: int = FORTH,
    ) -> PendingWorks:
        """Start all messages; they must stay untouched until `wait`."""
        transport, ranks = self._transport, self._ranks
        group, processes = transport.group, [transport.members[rank] for rank in ranks]
        landing: list[tuple[Message, Message]] = []
        if transport.stages:
            sends = [(transport.on_host(message, filled=True), member) for message, member in sends]
            staged = [(transport.on_host(message), member) for message, member in receives]
            landing = [(host, message) for (host, _), (message, _) in zip(staged, receives, strict=True)]
            receives = staged
        arriving: list[tuple[Message, int]] = []
        if transport.checks_lengths:
            for message, _ in sends:
                message.length.fill_(message.payload_bytes)
            for message, member in receives:
                message.length.fill_(-1)
                arriving.append((message, ranks[member]))
        # gloo tells lanes apart by the tag; NCCL goes by order, which is the same on both sides.
        ops = [dist.P2POp(dist.isend, m.whole, processes[member], group, lane) for m, member in sends]
        ops += [dist.P2POp(dist.irecv, m.whole, processes[member], group, lane) for m, member in receives]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise _peer_lost(ranks, error) from error
        return PendingWorks(works, ranks, transport.rank, arriving, self.waits, landing)


class PendingWorks:
    """Messages under way; NCCL gives one work for all of them, gloo one each."""

    def __init__(
        self,
        works: list[dist.Work],
        ranks: tuple[int, ...],
        rank: int,
        arriving: Sequence[tuple[Message, int]],
        waits: list[tuple[float, float]],
        landing: Sequence[tuple[Message, Message]] = (),
    ) -> None:
        self._works, self._ranks, self._rank, self._arriving = works, ranks, rank, arriving
        self._waits, self._landing = waits, landing

    def wait(self) -> None:
        """Until every message has been sent or has arrived.

        Raises:
            RankFailedError: a peer closed the connection or did not answer in time.
            DisagreementError: a message is not as long as this rank expects.
        """
        begun_s = time.perf_counter()
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _peer_lost(self._ranks, error) from error
        self._waits.append((begun_s, time.perf_counter()))
        for message, peer in self._arriving:
            got, expected = int(message.length), message.payload_bytes
            if got != expected:
                raise DisagreementError(
                    f"rank {self._rank} expected {expected} bytes from rank {peer} and got {got}",
                    "The two ranks run different plans, models or versions of FlexCP; start all ranks alike.",
                )
        for host, message in self._landing:
            message.payload.copy_(host.payload)


def _peer_lost(ranks: tuple[int, ...], error: RuntimeError) -> RankFailedError:
    return RankFailedError(
        f"an exchange among ranks {list(ranks)} failed: {str(error).splitlines()[0]}",
        "Another rank has ended or stalled; its own output says why.",
    )
