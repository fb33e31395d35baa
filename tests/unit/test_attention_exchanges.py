"""Gather and all-to-all on threads against dense fp64, as the ring is in test_attention_ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.reference import (
    ThreadExchange,
    attend_densely,
    attend_in_group,
    dense_attention,
    gather,
    random_qkv,
    relative_error,
    run_members,
    scatter,
)
from torch import Tensor

from flexcp.attention import exchange as exchange_module
from flexcp.attention import gather as gather_module
from flexcp.attention import group_attention, heads, kernel_for
from flexcp.core.errors import UnsupportedError
from flexcp.core.layout import Layout, heads_divide, make_layout
from flexcp.core.plan import EXCHANGE_KINDS, ExchangeKind
from flexcp.core.sample import Sample, samples_from_lengths

PACKS = {
    "causal": samples_from_lengths([97, 1, 40, 13, 3]),
    "full": tuple(Sample(i, n, ((0, n),)) for i, n in enumerate([61, 7, 30])),
    "mixed": (Sample(0, 90, ((5, 30), (30, 31), (60, 90))), Sample(1, 40), Sample(2, 9, ((2, 7),))),
    "below the degree": samples_from_lengths([2, 1, 5, 4]),
    "three rows": samples_from_lengths([2, 1]),
}
BANDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def heads_for(degree: int) -> list[tuple[int, int]]:
    """MHA, GQA and MQA; key/value heads that divide by the degree, and fewer that are repeated."""
    return [(2 * degree, 2 * degree), (4 * degree, degree), (2 * degree, 1), (2 * degree, degree)]


def rows(layout: Layout) -> int:
    return sum(sample.tokens for sample in layout.samples)


@pytest.mark.parametrize("kind", ["gather", "all-to-all"])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_values_and_gradients_equal_dense_attention(degree: int, pack: str, kind: ExchangeKind) -> None:
    """D24 D25 D40: odd lengths, spans, samples shorter than 2d, whole samples, in three dtypes."""
    for dtype, band in BANDS.items():
        for q_heads, kv_heads in heads_for(degree) if dtype == torch.float64 else heads_for(degree)[2:3]:
            for whole_below_tokens in (0, 20):
                layout = make_layout(PACKS[pack], degree, whole_below_tokens)
                tensors = random_qkv(rows(layout), q_heads, kv_heads, 8, dtype)
                got = attend_in_group(*tensors, layout, kind=kind)
                errors = got.errors(attend_densely(*tensors, layout.samples))
                assert all(error <= band for error in errors.values()), (dtype, q_heads, kv_heads, errors)


def test_gather_runs_where_heads_do_not_divide() -> None:
    layout = make_layout(PACKS["mixed"], 5, 0)
    tensors = random_qkv(rows(layout), 6, 2)
    errors = attend_in_group(*tensors, layout, kind="gather").errors(attend_densely(*tensors, layout.samples))
    assert all(error <= 1e-12 for error in errors.values()), errors


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", [2, 3, 5])
def test_log_sum_exp(degree: int, pack: str) -> None:
    """What backward rests on: over all keys of a row, for its heads, by a scale of one's own."""
    layout = make_layout(PACKS[pack], degree, 0)
    q, k, v, _ = random_qkv(rows(layout), 2 * degree, degree)
    shards = [scatter(x, layout) for x in (q, k, v)]
    kernel = kernel_for(q.device, q.dtype, q.shape[-1])
    _, want = dense_attention(q, k, v, layout.samples, 0.11)

    def gathered(exchange: ThreadExchange) -> Tensor:
        inputs = [parts[exchange.member] for parts in shards]
        return gather_module.forward(*inputs, layout, exchange, kernel, 0.11)[1][-1]

    assert relative_error(gather(run_members(degree, gathered, "gather"), layout), want) <= 1e-12

    def by_heads(exchange: ThreadExchange) -> Tensor:
        inputs = [parts[exchange.member] for parts in shards]
        return heads.forward(*inputs, layout, exchange, kernel, 0.11)[1][4]

    by_member = run_members(degree, by_heads, "all-to-all")
    assert relative_error(torch.cat(by_member, dim=1), want) <= 1e-12


def test_what_each_exchange_sends() -> None:
    """99 rows on 3 members, 6 query and 3 key/value heads of width 8, bf16: by hand."""
    layout = make_layout((Sample(0, 99),), 3, 0)
    tensors = random_qkv(99, 6, 3, 8, torch.bfloat16)
    gathered = attend_in_group(*tensors, layout, kind="gather")
    keys_and_values = 2 * 33 * 2 * 3 * 8
    assert gathered.forward_bytes == (keys_and_values * 2,) * 3
    assert gathered.backward_bytes == (keys_and_values * 2 + keys_and_values * 4,) * 3
    swapped = attend_in_group(*tensors, layout, kind="all-to-all")
    queries, kv = 33 * 2 * 8, 33 * 1 * 8
    assert swapped.forward_bytes == (2 * (queries + 2 * kv + queries) * 2,) * 3
    assert swapped.backward_bytes == (2 * (queries + queries + 2 * kv) * 2,) * 3


@pytest.mark.parametrize("kind", EXCHANGE_KINDS)
def test_two_runs_are_bitwise_equal(kind: ExchangeKind) -> None:
    """D45: sums are made in the order of the members, whoever is faster."""
    layout = make_layout(PACKS["mixed"], 4, 20)
    tensors = random_qkv(rows(layout), 8, 2, 16, torch.float32)
    first, second = (attend_in_group(*tensors, layout, kind=kind) for _ in range(2))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("kind", EXCHANGE_KINDS)
def test_buffers_are_made_once(kind: ExchangeKind) -> None:
    """After the first pass over the largest pack no message needs new storage, of any layer or step."""
    large, small = (make_layout(samples_from_lengths(lengths), 4, 0) for lengths in ([90, 41], [33]))
    q, k, v, do = random_qkv(131, 8, 4)

    def work(exchange: ThreadExchange) -> list[int]:
        counts = []
        for layout in (large, small, large, small):
            total = rows(layout)
            shards = [scatter(x[:total], layout)[exchange.member].requires_grad_() for x in (q, k, v)]
            out = group_attention(*shards, layout, exchange)
            out.backward(scatter(do[:total], layout)[exchange.member])
            counts.append(exchange.buffers.allocations)
        return counts

    for counts in run_members(4, work, kind):
        assert counts[0] > 0
        assert counts == [counts[0]] * 4


@pytest.mark.parametrize("kind", ["gather", "all-to-all"])
@pytest.mark.parametrize("limit", ["_MOST_ROUNDS", "_MOST_BYTES"])
def test_batches_are_bounded(kind: ExchangeKind, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In number and in bytes; what does not fit in one batch comes in the next, and nothing changes."""
    layout = make_layout(PACKS["causal"], 5, 0)
    tensors = random_qkv(rows(layout), 10, 5)
    want = attend_in_group(*tensors, layout, kind=kind)
    most: list[int] = []

    def work(exchange: ThreadExchange) -> Tensor:
        shards = [scatter(x, layout)[exchange.member] for x in tensors[:3]]
        out = group_attention(*shards, layout, exchange)
        most.append(exchange.most_messages)
        return out

    run_members(5, work, kind)
    assert set(most) == {8}
    most.clear()
    monkeypatch.setattr(exchange_module, limit, 1)
    assert torch.equal(gather(run_members(5, work, kind), layout), want.out)
    assert set(most) == {2}


class Noted:
    """An exchange that writes down whom it was asked to write to and to hear from, batch by batch."""

    def __init__(self, member: int, degree: int) -> None:
        self.member, self.degree = member, degree
        self.batches: list[tuple[set[int], set[int]]] = []

    def post(self, sends: Any, receives: Any, lane: int = 0) -> Noted:
        self.batches.append(({peer for _, peer in sends}, {peer for _, peer in receives}))
        return self

    def wait(self) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("degree", [3, 5, 7, 33])
@pytest.mark.parametrize("most_rounds", [1, 32])
def test_every_send_has_its_receive_in_the_same_batch(
    degree: int, most_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D33: odd numbers of members need no bye; every pair meets once each way, at the same time."""
    monkeypatch.setattr(exchange_module, "_MOST_ROUNDS", most_rounds)
    message = exchange_module.Message.zeros((1,), torch.float32, torch.device("cpu"))
    members = [Noted(member, degree) for member in range(degree)]
    for noted in members:
        others = dict.fromkeys(set(range(degree)) - {noted.member}, message)
        exchange_module.Swap(noted, others, others, largest_bytes=4).wait()

    assert {len(noted.batches) for noted in members} == {(degree - 1 + most_rounds - 1) // most_rounds}
    for noted in members:
        assert set().union(*(sends for sends, _ in noted.batches)) == set(range(degree)) - {noted.member}
        for batch, (sends, _) in enumerate(noted.batches):
            assert all(noted.member in members[peer].batches[batch][1] for peer in sends)
    assert sum(len(sends) for n in members for sends, _ in n.batches) == degree * (degree - 1)
    assert sum(len(receives) for n in members for _, receives in n.batches) == degree * (degree - 1)


def test_heads_that_cannot_be_dealt_out_are_refused() -> None:
    """The numbers, and what runs instead."""
    layout = make_layout((Sample(0, 30),), 3, 0)
    assert not heads_divide(8, 2, 3)

    def work(exchange: ThreadExchange) -> str:
        q, k, v, _ = (scatter(x, layout)[exchange.member] for x in random_qkv(30, 8, 2))
        with pytest.raises(UnsupportedError) as caught:
            group_attention(q, k, v, layout, exchange)
        return str(caught.value)

    for text in run_members(3, work, "all-to-all"):
        assert "8 query and 2 key/value heads cannot be dealt out to 3 ranks" in text
        assert "rings and gathers run at any degree" in text
