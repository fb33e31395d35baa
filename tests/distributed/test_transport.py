"""Messages between real processes: lengths are checked, lanes do not mix, likely peers have met."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
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
    """D31, D47: gloo fills a part of the buffer and says nothing; rank, peer and both lengths are named."""
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


def attend(world: Any, stages: bool) -> list[Any]:
    """Three layers' worth of ring attention in changing groups, three times: groups, buffers, values."""
    from flexcp.attention import group_attention
    from flexcp.core.layout import make_layout
    from flexcp.core.sample import samples_from_lengths
    from flexcp.runtime.transport import Transport
    from tests.reference import random_qkv, scatter

    transport = Transport()
    transport.stages = stages
    samples = samples_from_lengths([61, 24])
    tensors = random_qkv(85, 4, 2)
    groups_at_start = len(dist.distributed_c10d._world.pg_map)
    storage, results = [], []
    for _ in range(3):
        for ranks in ((0, 1, 2), (2, 0), (1, 0), (2, 1)):
            if world.rank in ranks:
                layout = make_layout(samples, len(ranks), 0)
                exchange = transport.exchange(ranks)
                shards = [scatter(x, layout)[exchange.member] for x in tensors]
                leaves = [x.clone().requires_grad_() for x in shards[:3]]
                out = group_attention(*leaves, layout, exchange)
                results.append([out.detach(), *torch.autograd.grad(out, leaves, shards[3])])
        flats = transport.buffers._flat
        storage.append((transport.buffers.allocations, {key: flat.data_ptr() for key, flat in flats.items()}))
    groups = (groups_at_start, len(dist.distributed_c10d._world.pg_map))
    return [groups, storage, results, [key[0] for key in flats]]


def test_groups_are_made_at_start_and_storage_in_the_first_round() -> None:
    """Whatever groups follow, no other process group; and nothing is allocated for a message seen before."""
    for groups, storage, *_ in run_ranks(attend, 3, False):
        assert groups == (2, 2)  # that of the world, and that of all messages
        assert storage[0] == storage[1] == storage[2]
        assert storage[0][0]


def test_messages_pass_through_the_host_where_the_backend_wants_them_there() -> None:
    """As with ranks that share an accelerator, where gloo cannot read the device: the same to the bit."""
    for direct, staged in zip(run_ranks(attend, 3, False), run_ranks(attend, 3, True), strict=True):
        torch.testing.assert_close(staged[2], direct[2], rtol=0, atol=0)
        assert staged[1][0] == staged[1][2]  # the places in host memory are used again, too
        assert any(name.startswith("host ") for name in staged[3])
        assert not any(name.startswith("host ") for name in direct[3])


def options_of_groups(world: Any) -> list[Any]:
    """What groups are made with: over gloo, and if torch said that it were NCCL."""
    from flexcp.runtime import transport as module

    class Options:
        def __init__(self, *, is_high_priority_stream: bool) -> None:
            self.goes_first = is_high_priority_stream
            self._timeout: Any = None

    made: list[Any] = []
    new_group = dist.new_group

    def noted(ranks: list[int], *, timeout: Any, pg_options: Any) -> Any:
        made.append((timeout.total_seconds(), pg_options and (pg_options.goes_first, pg_options._timeout)))
        return new_group(ranks, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        module.Transport(30.0)
        patch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
        patch.setattr(dist, "get_backend", lambda group=None: "nccl" if group is None else "gloo")
        module.Transport(40.0)
    return made


def test_messages_go_first_on_nccl() -> None:
    """A kernel that fills the device would hold them back. The timeout is the group's, or torch warns."""
    assert run_ranks(options_of_groups, 1) == [[(30.0, None), (40.0, (True, timedelta(seconds=40)))]]


def untouched_words(world: Any) -> list[int]:
    """Length words after a message that nobody checks."""
    from flexcp.attention import Message
    from flexcp.runtime.transport import Transport

    transport = Transport()
    words = []
    for checks in (True, False):
        transport.checks_lengths = checks
        leaving, arriving = (Message.zeros((4,), torch.float32, CPU) for _ in range(2))
        leaving.length.fill_(77)
        other = 1 - world.rank
        transport.exchange((0, 1)).post([(leaving, other)], [(arriving, other)]).wait()
        words.append(int(arriving.length))
    return words


def test_lengths_are_written_only_for_who_reads_them() -> None:
    """On NCCL that would be a kernel a message, for nothing."""
    assert run_ranks(untouched_words, 2) == [[16, 77]] * 2
