"""One tile at a time: kernels against dense fp64, and the merge that joins them."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.reference import dense_attention, random_qkv, relative_error
from torch import Tensor

from flexcp.attention.kernels import CpuKernel, DenseKernel, Kernel, kernel_for
from flexcp.attention.merge import merge_
from flexcp.core.errors import UnsupportedError
from flexcp.core.sample import Sample

KERNELS = [CpuKernel(), DenseKernel()]
# bf16 keeps 8 bits: 2**-9 = 2e-3 per rounding, a few of them in a gradient. fp16 keeps 11.
BANDS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def expected(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float) -> list[Tensor]:
    """out, lse, dq, dk, dv of one tile in fp64; the keys of a rectangle go before its queries."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if causal:
        out, lse = dense_attention(*leaves, [Sample(0, len(q))], scale)
    else:
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in leaves[1:])
        scores = torch.einsum("qhd,khd->hqk", leaves[0], keys) * scale
        out, lse = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1).T
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, do.double())]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("dtype", BANDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(2, 2, 8), (6, 2, 40), (4, 1, 7)])
@pytest.mark.parametrize(("q_rows", "k_rows", "causal"), [(1, 1, True), (77, 77, True), (5, 64, False)])
def test_kernels_agree_with_fp64(
    kernel: Kernel,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    q_rows: int,
    k_rows: int,
    causal: bool,
) -> None:
    q, _, _, do = random_qkv(q_rows, heads, kv_heads, width, dtype)
    _, k, v, _ = random_qkv(k_rows, heads, kv_heads, width, dtype, seed=1)
    want = expected(q, k, v, do, causal, 0.3)
    out, lse = kernel.forward(q, k, v, causal, 0.3)
    grads = kernel.backward(do, q, k, v, out, lse, causal, 0.3)
    got = [out, lse, *grads]
    assert [x.shape for x in got] == [x.shape for x in want]
    assert {x.dtype for x in (out, *grads)} == {dtype}
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        # with one key dq and dk are 0 in theory and a difference of equal numbers in practice
        error = float((a.double() - b).abs().max()) / max(1.0, float(b.abs().max()))
        assert error <= BANDS[dtype], name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_kernels_take_strided_rows(kernel: Kernel) -> None:
    """D41: slices of one packed projection, and rows of a larger buffer."""
    packed = torch.randn(50, 3, 4, 16, dtype=torch.float64)
    views = [packed[10:40, i] for i in range(3)]
    copies = [view.clone() for view in views]
    do = torch.randn(30, 8, 16, dtype=torch.float64)[:, ::2]
    for causal in (True, False):
        out, lse = kernel.forward(*views, causal, 0.2)
        again = kernel.forward(*copies, causal, 0.2)
        torch.testing.assert_close((out, lse), again, rtol=0, atol=0)
        grads = kernel.backward(do, *views, out, lse, causal, 0.2)
        again = kernel.backward(do.contiguous(), *copies, out, lse, causal, 0.2)
        torch.testing.assert_close(grads, again, rtol=0, atol=0)


def test_gradients_of_tiles_add_up_under_the_global_lse() -> None:
    """Split the keys anywhere: with out and lse over all keys, the parts sum to the whole."""
    q, k, v, do = random_qkv(40, 6, 2, 16)
    for kernel in KERNELS:
        out, lse = kernel.forward(q, k, v, False, 0.25)
        whole = kernel.backward(do, q, k, v, out, lse, False, 0.25)
        for cut in (1, 13, 39):
            head = kernel.backward(do, q, k[:cut], v[:cut], out, lse, False, 0.25)
            tail = kernel.backward(do, q, k[cut:], v[cut:], out, lse, False, 0.25)
            parts = (head[0] + tail[0], torch.cat((head[1], tail[1])), torch.cat((head[2], tail[2])))
            torch.testing.assert_close(parts, whole, rtol=0, atol=1e-13)


def test_the_table_knows_cpu_and_says_when_it_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(kernel_for(torch.device("cpu"), torch.bfloat16, 7), CpuKernel)
    kernel_for.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert isinstance(kernel_for(torch.device("meta"), torch.float32, 64), DenseKernel)
    assert "no attention kernel for torch.float32 x 64 on device 'meta'" in caplog.text
    with pytest.raises(UnsupportedError, match=r"torch\.int64 is not implemented\nUse one of torch\.float64"):
        kernel_for(torch.device("cpu"), torch.int64, 64)


def fresh(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.zeros(rows, 2, 8, dtype=dtype), torch.full((rows, 2), float("-inf"), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_merged_parts_equal_the_whole(dtype: torch.dtype) -> None:
    q, k, v, _ = random_qkv(30, dtype=dtype)
    whole = DenseKernel().forward(q, k, v, False, 0.3)
    out, lse = fresh(30, dtype)
    for part in (slice(0, 1), slice(1, 17), slice(17, 30)):
        merge_(out, lse, *DenseKernel().forward(q, k[part], v[part], False, 0.3))
    bound = 1e-14 if dtype == torch.float64 else 2e-6
    assert relative_error(out, whole[0].double()) <= bound
    assert relative_error(lse, whole[1].double()) <= bound


def test_merge_leaves_untouched_rows_alone() -> None:
    """D20: a row that saw nothing, and a tile that saw nothing, make neither NaN nor a wrong weight."""
    out, lse = fresh(3)
    merge_(out, lse, *fresh(3))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    value, level = torch.randn(3, 2, 8), torch.randn(3, 2)
    merge_(out, lse, value, level)
    merge_(out, lse, *fresh(3))
    assert torch.equal(out, value)
    assert torch.equal(lse, level)


def test_merge_stands_far_apart_levels_and_shows_nan() -> None:
    """No overflow at levels of 1e4 either way, and bad numbers are not painted over."""
    for first, second in ((1e4, -1e4), (-1e4, 1e4), (-1e30, 1e30)):
        out, lse = fresh(1)
        merge_(out, lse, torch.full((1, 2, 8), 1.0), torch.full((1, 2), first))
        merge_(out, lse, torch.full((1, 2, 8), 2.0), torch.full((1, 2), second))
        assert torch.equal(out, torch.full((1, 2, 8), 1.0 if first > second else 2.0))
    merge_(out, lse, torch.full((1, 2, 8), float("nan")), torch.zeros(1, 2))
    merge_(out, lse, torch.ones(1, 2, 8), torch.full((1, 2), float("nan")))
    assert out.isnan().all()
