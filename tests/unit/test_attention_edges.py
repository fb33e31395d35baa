"""Ring attention where others broke: empty shards, tiny and prime lengths, boundaries, odd callers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.reference import (
    ThreadExchange,
    ThreadGroup,
    attend_densely,
    attend_in_group,
    gather,
    random_qkv,
    rows_of,
    run_members,
    scatter,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexcp.attention import Kernel, group_attention, kernel_for
from flexcp.core.errors import InputError
from flexcp.core.layout import Layout, make_layout
from flexcp.core.sample import Sample, samples_from_lengths

CPU = torch.device("cpu")


def assert_exact(layout: Layout, kernel: Kernel | None = None) -> None:
    """Values and gradients in fp64 equal dense attention."""
    tensors = random_qkv(sum(sample.tokens for sample in layout.samples), heads=4)
    got, want = attend_in_group(*tensors, layout, kernel), attend_densely(*tensors, layout.samples)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=1e-12)


class StrictKernel:
    """The CPU kernel, behind a guard against what would end the process: an empty tensor."""

    def __init__(self) -> None:
        self._kernel = kernel_for(CPU, torch.float64, 8)
        self.calls = 0

    def _guard(self, *tensors: Tensor, causal: bool) -> None:
        self.calls += 1
        assert all(x.numel() for x in tensors)
        assert not causal or len(tensors[0]) == len(tensors[1])

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self._guard(q, k, v, causal=causal)
        return self._kernel.forward(q, k, v, causal, scale)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._guard(q, k, v, do, out, lse, causal=causal)
        return self._kernel.backward(do, q, k, v, out, lse, causal, scale)


@pytest.mark.parametrize("lengths", [[1], [2], [1, 1, 1], [3, 1, 2], [1, 50], [600, 2]])
@pytest.mark.parametrize("whole_below_tokens", [0, 512])
def test_kernels_never_see_an_empty_tensor(lengths: list[int], whole_below_tokens: int) -> None:
    """D20 D21: members without rows, samples below the degree, blocks without keys."""
    for degree in (1, 2, 5, 8):
        layout = make_layout(samples_from_lengths(lengths), degree, whole_below_tokens)
        kernel = StrictKernel()
        assert_exact(layout, kernel=kernel)
        assert kernel.calls >= 2


def test_members_without_cut_rows_are_not_in_the_ring() -> None:
    """Whole samples never travel, and the ring passes by a member that has nothing else."""
    whole = make_layout(samples_from_lengths([9, 5]), 5, 512)
    assert attend_in_group(*random_qkv(14), whole).backward_bytes == (0, 0, 0, 0, 0)
    layout = make_layout(samples_from_lengths([40, 60, 41]), 4, 50)
    assert [layout.cut_rows(member) for member in range(4)] == [0, 0, 30, 30]
    assert_exact(layout)
    block = 30 * 2 * 2 * 8 * 8  # rows, K and V, heads, width, bytes
    assert attend_in_group(*random_qkv(141), layout).forward_bytes == (0, 0, block, block)


@pytest.mark.parametrize("degree", [3, 5, 7])
@pytest.mark.timeout(60)
def test_prime_lengths_end(degree: int) -> None:
    """D23: nothing divides by the degree, and nothing waits."""
    for lengths in ([97], [101, 7, 2, 53], [2, 3, 5, 7, 11, 13]):
        assert_exact(make_layout(samples_from_lengths(lengths), degree, 0))


@pytest.mark.parametrize("degree", [2, 3, 5, 7])
@pytest.mark.timeout(60)
def test_lengths_below_the_degree(degree: int) -> None:
    """D24: every length from one row to just past 2d."""
    for tokens in range(1, 2 * degree + 2):
        layout = make_layout((Sample(0, tokens), Sample(1, 40)), degree, 0)
        assert_exact(layout)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_documents_do_not_see_each_other(degree: int) -> None:
    """D10: five documents; noise in one leaves every bit of the others as it was, forward and backward."""
    lengths = [60, 33, 7, 90, 41]
    layout = make_layout(samples_from_lengths(lengths), degree, 40)
    q, k, v, do = random_qkv(sum(lengths), 4, 2, 8, torch.float32)
    before = attend_in_group(q, k, v, do, layout)
    for x in (q, k, v, do):
        x[60:93] = torch.randn_like(x[60:93]) * 100
    after = attend_in_group(q, k, v, do, layout)
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[60:93] = False
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(before, name)[others], getattr(after, name)[others]), name
        assert not torch.equal(getattr(before, name)[~others], getattr(after, name)[~others]), name


def test_seven_rows_stay_seven() -> None:
    """D13: 7 rows of a buffer of 10 whose rest holds 200; on 2 members they are 7, and equal 7 alone."""
    buffers = [torch.full((10, 2, 8), 200.0, dtype=torch.float64) for _ in range(4)]
    for buffer, x in zip(buffers, random_qkv(7), strict=True):
        buffer[:7] = x
    layout = make_layout((Sample(0, 7),), 2, 0)
    assert layout.rows(0) + layout.rows(1) == 7
    ring = attend_in_group(*(buffer[:7] for buffer in buffers), layout)
    alone = attend_in_group(*random_qkv(7), make_layout((Sample(0, 7),), 1, 0))
    for name in ("out", "dq", "dk", "dv"):
        assert len(getattr(ring, name)) == 7
        torch.testing.assert_close(getattr(ring, name), getattr(alone, name), rtol=0, atol=1e-14)


@pytest.mark.parametrize("degree", [1, 3])
def test_inputs_need_not_be_contiguous(degree: int) -> None:
    """D41: slices of a packed projection, a strided last axis, and the expanded gradient of a sum."""
    layout = make_layout((Sample(0, 50), Sample(1, 9)), degree, 20)
    q, k, v, _ = random_qkv(59, 4, 4)
    want = attend_densely(q, k, v, torch.ones_like(q), layout.samples)

    def packed(inputs: list[Tensor]) -> Tensor:
        return torch.stack(inputs, dim=1).requires_grad_()  # [T, 3, H, D], as one projection gives it

    def wide(inputs: list[Tensor]) -> Tensor:
        return torch.stack(inputs, dim=-1).requires_grad_()  # [T, H, D, 3], last axis strided

    for pack, dim in ((packed, 1), (wide, -1)):

        def work(exchange: ThreadExchange, pack: Callable = pack, dim: int = dim) -> tuple[Tensor, Tensor]:
            leaf = pack([scatter(x, layout)[exchange.member] for x in (q, k, v)])
            out = group_attention(*leaf.unbind(dim), layout, exchange)
            (grad,) = torch.autograd.grad(out.sum(), leaf)
            return out.detach(), grad.movedim(dim, 1)

        outs, grads = zip(*run_members(degree, work), strict=True)
        torch.testing.assert_close(gather(outs, layout), want.out, rtol=0, atol=1e-12)
        expected = torch.stack((want.dq, want.dk, want.dv), dim=1)
        torch.testing.assert_close(gather(grads, layout), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_some_inputs_need_gradients(wanted: tuple[bool, bool, bool]) -> None:
    """Also when members differ in it: every member sends what the others wait for."""
    layout = make_layout((Sample(0, 50),), 3, 0)
    q, k, v, do = random_qkv(50)
    dense = attend_densely(q, k, v, do, layout.samples)

    def work(exchange: ThreadExchange) -> list[Tensor | None]:
        mine = wanted if exchange.member else (True, True, True)
        shards = [scatter(x, layout)[exchange.member] for x in (q, k, v)]
        leaves = [x.requires_grad_(need) for x, need in zip(shards, mine, strict=True)]
        group_attention(*leaves, layout, exchange).backward(scatter(do, layout)[exchange.member])
        return [leaf.grad for leaf in leaves]

    for member, grads in enumerate(run_members(3, work)):
        mine = wanted if member else (True, True, True)
        for got, full, need in zip(grads, (dense.dq, dense.dk, dense.dv), mine, strict=True):
            assert (got is not None) == need
            if got is not None:
                torch.testing.assert_close(got, full[rows_of(layout, member)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_layers_in_flight_and_recomputation(recompute: bool) -> None:
    """Three calls under way at once, of two layouts, and run again in backward under checkpointing."""
    packs = [make_layout((Sample(0, 40), Sample(1, 15)), 3, whole) for whole in (0, 20)]
    q, k, v, do = random_qkv(55)
    want = attend_densely(q, k, v, do, packs[0].samples)

    def work(exchange: ThreadExchange) -> list[tuple[Tensor, ...]]:
        calls = []
        for layout in (packs[0], packs[1], packs[0]):
            shards = [scatter(x, layout)[exchange.member].requires_grad_() for x in (q, k, v)]
            if recompute:
                out = checkpoint(group_attention, *shards, layout, exchange, use_reentrant=False)
            else:
                out = group_attention(*shards, layout, exchange)
            calls.append((out, shards, scatter(do, layout)[exchange.member]))
        return [(o.detach(), *torch.autograd.grad(o, leaves, grad)) for o, leaves, grad in reversed(calls)]

    for layout, results in zip(
        (packs[0], packs[1], packs[0]), zip(*run_members(3, work), strict=True), strict=True
    ):
        full = [gather(parts, layout) for parts in zip(*results, strict=True)]
        torch.testing.assert_close(full, [want.out, want.dq, want.dk, want.dv], rtol=0, atol=1e-12)


def test_evaluation_takes_the_same_path() -> None:
    """Without a graph the values are the same bits."""
    layout = make_layout((Sample(0, 50),), 2, 0)
    q, k, v, do = random_qkv(50, dtype=torch.float32)

    def work(exchange: ThreadExchange) -> Tensor:
        with torch.no_grad():
            return group_attention(
                *(scatter(x, layout)[exchange.member] for x in (q, k, v)), layout, exchange
            )

    parts = run_members(2, work)
    assert not any(part.requires_grad for part in parts)
    assert torch.equal(gather(parts, layout), attend_in_group(q, k, v, do, layout).out)


def test_backward_keeps_no_more_than_inputs_output_and_lse() -> None:
    """What autograd holds per layer is q, k, v, out and lse: no block of a neighbour, no score."""
    held: list[Tensor] = []
    layout = make_layout((Sample(0, 64),), 1, 0)
    q, k, v, _ = (x.requires_grad_() for x in random_qkv(64, 4, 2, 8, torch.bfloat16))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        group_attention(q, k, v, layout, ThreadExchange(ThreadGroup(1), 0))
    assert [(tuple(x.shape), x.dtype) for x in held] == [
        ((64, 4, 8), torch.bfloat16),
        ((64, 2, 8), torch.bfloat16),
        ((64, 2, 8), torch.bfloat16),
        ((64, 4, 8), torch.bfloat16),
        ((64, 4), torch.float32),
    ]


def test_what_does_not_fit_is_refused_by_number() -> None:
    layout = make_layout((Sample(0, 7),), 2, 0)
    q, k, v, _ = random_qkv(9, 4, 2)
    exchange = ThreadExchange(ThreadGroup(2), 0)
    cases = [
        (lambda: group_attention(q, k, v, layout, exchange), r"gave 9 rows .*places 4 rows"),
        (lambda: group_attention(q[:4], k, v, layout, exchange), r"gave 4 rows of q and 9 of k"),
        (lambda: group_attention(q, k, v[:, :1], layout, exchange), r"do not fit together"),
        (lambda: group_attention(*(x[..., :0] for x in (q, k, v)), layout, exchange), r"do not fit together"),
        (lambda: group_attention(q[:4, :3], k[:4], v[:4], layout, exchange), r"3 query heads .* 2 key"),
        (lambda: group_attention(q[:4], k[:4].float(), v[:4], layout, exchange), r"float32 on cpu"),
        (
            lambda: group_attention(q, k, v, layout, ThreadExchange(ThreadGroup(3), 0)),
            r"has 3 members, the layout is for 2",
        ),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


def test_a_lost_member_ends_the_others() -> None:
    """The harness itself: one member that raises frees the rest, and its own error is the one shown."""
    layout = make_layout((Sample(0, 30),), 3, 0)
    q, k, v, _ = random_qkv(30)

    def work(exchange: ThreadExchange) -> Tensor:
        if exchange.member == 1:
            raise ValueError("member 1 is lost")
        return group_attention(*(scatter(x, layout)[exchange.member] for x in (q, k, v)), layout, exchange)

    with pytest.raises(ValueError, match="member 1 is lost"):
        run_members(3, work)
