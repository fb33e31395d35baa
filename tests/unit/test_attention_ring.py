"""Ring attention on threads against dense fp64: values, gradients, precision, determinism, bytes."""

from __future__ import annotations

import pytest
import torch
from tests.reference import (
    Attended,
    ThreadExchange,
    attend_densely,
    attend_in_group,
    dense_attention,
    gather,
    random_qkv,
    relative_error,
    relative_norm_error,
    run_members,
    scatter,
)
from torch import Tensor

from flexcp.attention import group_attention, kernel_for, ring, ring_traffic_bytes
from flexcp.core.layout import Layout, make_layout
from flexcp.core.sample import Sample, samples_from_lengths

DEGREES = (1, 2, 3, 5, 7)
PACKS = {
    "causal": samples_from_lengths([97, 1, 40, 13, 3]),
    "full": tuple(Sample(i, n, ((0, n),)) for i, n in enumerate([61, 7, 30])),  # D25
    "mixed": (Sample(0, 90, ((5, 30), (30, 31), (60, 90))), Sample(1, 40), Sample(2, 9, ((2, 7),))),
    "below the degree": samples_from_lengths([2, 1, 5, 4]),  # D24
}
HEADS = [(2, 2), (6, 2)]
# Largest difference over the largest value. fp32 is a contract. bf16 rounds inputs of each product and every
# tile's result to 8 bits (2e-3 each), and a gradient goes through a handful of them.
BANDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def rows(layout: Layout) -> int:
    return sum(sample.tokens for sample in layout.samples)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", DEGREES)
def test_values_and_gradients_equal_dense_attention(degree: int, pack: str, dtype: torch.dtype) -> None:
    """D24 D25 D40: out and the gradients of the activations q, k, v, with and without whole samples."""
    for heads, kv_heads in HEADS:
        for whole_below_tokens in (0, 20):
            layout = make_layout(PACKS[pack], degree, whole_below_tokens)
            tensors = random_qkv(rows(layout), heads, kv_heads, 8, dtype)
            errors = attend_in_group(*tensors, layout).errors(attend_densely(*tensors, layout.samples))
            assert all(error <= BANDS[dtype] for error in errors.values()), errors


def test_fp16_and_an_odd_head_width() -> None:
    layout = make_layout(PACKS["mixed"], 3, 20)
    for dtype, width in ((torch.float16, 16), (torch.float64, 7), (torch.float32, 40)):
        tensors = random_qkv(rows(layout), 6, 2, width, dtype)
        errors = attend_in_group(*tensors, layout).errors(attend_densely(*tensors, layout.samples))
        assert all(error <= BANDS[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", DEGREES)
def test_log_sum_exp_and_scale(degree: int, pack: str) -> None:
    """The lse that backward rests on is that over all keys, also under a scale of one's own."""
    layout = make_layout(PACKS[pack], degree, 20)
    q, k, v, _ = random_qkv(rows(layout), 6, 2)
    shards = [scatter(x, layout) for x in (q, k, v)]
    kernel = kernel_for(q.device, q.dtype, q.shape[-1])

    def work(exchange: ThreadExchange) -> tuple[Tensor, Tensor]:
        inputs = [parts[exchange.member] for parts in shards]
        out, saved = ring.forward(*inputs, layout, exchange, kernel, 0.11)
        return out, saved[-1]

    outs, lses = zip(*run_members(degree, work), strict=True)
    want_out, want_lse = dense_attention(q, k, v, layout.samples, 0.11)
    assert relative_error(gather(outs, layout), want_out) <= 1e-12
    assert relative_error(gather(lses, layout), want_lse) <= 1e-12


def test_bf16_error_does_not_grow_with_the_degree() -> None:
    """D39: partial results are summed in fp32, so 8 members are as exact as 1."""
    samples = samples_from_lengths([700, 333])
    tensors = random_qkv(1033, 2, 1, 32, torch.bfloat16)
    want = attend_densely(*tensors, samples)
    runs = {d: attend_in_group(*tensors, make_layout(samples, d, 0)) for d in (1, 2, 3, 5, 8)}
    for name in ("out", "dq", "dk", "dv"):
        errors = {
            degree: relative_norm_error(getattr(ran, name), getattr(want, name))
            for degree, ran in runs.items()
        }
        assert errors[1] <= 7e-3, (name, errors)
        assert all(error <= 1.25 * errors[1] for error in errors.values()), (name, errors)


def chain(x: Tensor, weights: Tensor, layers: int, attend: object) -> Tensor:
    """`layers` residual attention layers on x [T, 2 * 16]; products are by row and send nothing."""
    for layer in range(layers):
        normal = torch.nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (normal @ weights[layer, i] for i in range(3))
        heads = (y.unflatten(-1, (2, 16)) for y in (q, k, v))
        x = x + attend(*heads).flatten(1) @ weights[layer, 3]  # type: ignore[operator]
    return x


def test_bf16_error_of_a_deep_chain_does_not_grow_with_the_degree() -> None:
    """D39: 32 layers at degrees 1..8; the gradient that leaves the bottom stays in one band."""
    layers, generator = 32, torch.Generator().manual_seed(3)
    samples = samples_from_lengths([83, 29])
    x = torch.randn(112, 32, generator=generator).bfloat16()
    weights = (torch.randn(layers, 4, 32, 32, generator=generator) * 32**-0.5).bfloat16()
    do = torch.randn(112, 32, generator=generator).bfloat16()

    exact = x.detach().double().requires_grad_()
    out = chain(exact, weights.double(), layers, lambda *qkv: dense_attention(*qkv, samples)[0])
    (want,) = torch.autograd.grad(out, exact, do.double())

    def error_at(degree: int) -> float:
        layout = make_layout(samples, degree, 0)
        shards, grads = scatter(x, layout), scatter(do, layout)

        def work(exchange: ThreadExchange) -> Tensor:
            leaf = shards[exchange.member].clone().requires_grad_()
            top = chain(leaf, weights, layers, lambda *qkv: group_attention(*qkv, layout, exchange))
            return torch.autograd.grad(top, leaf, grads[exchange.member])[0]

        return relative_norm_error(gather(run_members(degree, work), layout), want)

    errors = {degree: error_at(degree) for degree in (1, 2, 3, 5, 8)}
    assert all(error <= 1.5 * errors[1] for error in errors.values()), errors
    assert errors[1] <= 0.03, errors


@pytest.mark.parametrize("degree", [2, 3, 7])
def test_two_runs_are_bitwise_equal(degree: int) -> None:
    """D45: whoever is faster, sums are made in the order of the ring."""
    layout = make_layout(PACKS["mixed"], degree, 20)
    tensors = random_qkv(rows(layout), 6, 2, 16, torch.float32)
    first, second = (attend_in_group(*tensors, layout) for _ in range(2))
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_bytes_sent_are_the_bytes_accounted(degree: int, pack: str, dtype: torch.dtype) -> None:
    layout = make_layout(PACKS[pack], degree, 20)
    ran = attend_in_group(*random_qkv(rows(layout), 6, 2, 8, dtype), layout)
    accounted = [ring_traffic_bytes(layout, member, 2, 8, dtype.itemsize) for member in range(degree)]
    assert ran.forward_bytes == tuple(traffic.forward for traffic in accounted)
    assert ran.backward_bytes == tuple(traffic.backward for traffic in accounted)
    assert degree > 1 or ran.forward_bytes == ran.backward_bytes == (0,)


def test_traffic_is_every_other_block_once() -> None:
    """99 rows on 3 members: two blocks of 33 rows pass, and two gradients in fp32."""
    layout = make_layout((Sample(0, 99),), 3, 0)
    traffic = ring_traffic_bytes(layout, 0, kv_heads=2, head_dim=8, dtype_bytes=2)
    assert traffic.forward == 2 * 33 * 2 * 2 * 8 * 2
    assert traffic.backward == traffic.forward + 2 * 33 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_length_32769(degree: int) -> None:
    """D43: one more than a power of two, too long for a dense reference: against degree 1, and dense rows."""
    samples = samples_from_lengths([32_769])
    q, k, v, do = random_qkv(32_769, 1, 1, 8, torch.float32)
    alone = attend_in_group(q, k, v, do, make_layout(samples, 1, 0))
    ring = attend_in_group(q, k, v, do, make_layout(samples, degree, 0))
    want = Attended(*(getattr(alone, name).double() for name in ("out", "dq", "dk", "dv")))
    assert all(error <= 1e-5 for error in ring.errors(want).values())
    for row in (0, 8192, 16_384, 32_768):
        scores = (k[: row + 1, 0] @ q[row, 0]).double() * 8**-0.5
        dense = scores.softmax(0) @ v[: row + 1, 0].double()
        assert relative_error(ring.out[row, 0], dense) <= 1e-5
