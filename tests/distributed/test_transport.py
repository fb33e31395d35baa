"""Messages between real processes: lengths are checked, lanes do not mix, likely peers have met."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.harness import run_ranks

CPU = torch.device("cpu")


def send_too_few(world: Any, rows: int) -> str:
    """Rank 2 sends `rows` rows of 16 bytes where rank 0 expects 5; rank 1 looks on."""
    from flexcp.attention import Message
    from flexcp.core.errors import DisagreementError
    from flexcp.runtime.transport import Transport

    transport = Transport()
    said = "all is well"
    if world.rank == 2:
        message = Message.zeros((rows, 4), torch.float32, CPU)
        message.payload.fill_(7.0)
        transport.exchange((2, 0)).post([(message, 1)], []).wait()
    if world.rank == 0:
        message = Message.zeros((5, 4), torch.float32, CPU)
        try:
            transport.exchange((2, 0)).post([], [(message, 0)]).wait()
            assert message.payload.eq(7.0).all()
        except DisagreementError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_short_message_is_an_error() -> None:
    """D31: gloo fills a part of the buffer and says nothing; rank, peer and both lengths are named."""
    assert run_ranks(send_too_few, 3, 5) == ["all is well"] * 3
    said = run_ranks(send_too_few, 3, 3)

    assert "rank 0 expected 80 bytes from rank 2 and got 48" in said[0]
    assert "different plans, models or versions" in said[0]


def swap_in_two_lanes(world: Any) -> list[float]:
    """Rank 0 posts lane 1 first, rank 1 lane 0 first: each lane keeps its own."""
    from flexcp.attention import Message
    from flexcp.runtime.transport import Transport

    exchange = Transport().exchange((0, 1))
    other = 1 - world.rank
    sent = {lane: Message.zeros((3,), torch.float32, CPU) for lane in (0, 1)}
    got = {lane: Message.zeros((3,), torch.float32, CPU) for lane in (0, 1)}
    pending = []
    for lane in (1, 0) if world.rank == 0 else (0, 1):
        sent[lane].payload.fill_(10.0 * world.rank + lane)
        pending.append(exchange.post([(sent[lane], other)], [(got[lane], other)], lane))
    for messages in pending:
        messages.wait()
    return [float(got[lane].payload[0]) for lane in (0, 1)]


def test_lanes_do_not_mix() -> None:
    """On gloo, whatever the order; NCCL has no lanes, so both sides keep one order there."""
    assert run_ranks(swap_in_two_lanes, 2) == [[10.0, 11.0], [0.0, 1.0]]


def greet(world: Any, ranks_per_node: int) -> tuple[tuple[int, ...], list[int]]:
    """Whom this rank greeted, and whom it really sent to before the first step."""
    from flexcp.runtime import transport as module

    peers: list[int] = []
    post = dist.batch_isend_irecv

    def noted(ops: list[Any]) -> Any:
        peers.extend(op.peer for op in ops if op.op is dist.isend)
        return post(ops)

    module.dist.batch_isend_irecv = noted
    try:
        met = module.Transport(ranks_per_node=ranks_per_node).met
    finally:
        module.dist.batch_isend_irecv = post
    return met, sorted(peers)


def test_likely_peers_meet_before_step_0() -> None:
    """Two nodes of two: the node, and the neighbours across it; every greeting is answered."""
    for rank, (met, peers) in enumerate(run_ranks(greet, 4, 2)):
        assert peers == list(met)
        assert set(met) == {rank ^ 1, (rank + 1) % 4, (rank - 1) % 4}
