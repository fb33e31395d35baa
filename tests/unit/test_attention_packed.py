"""Kernels of many sequences a call, on CPU: torch's CUDA operators are replaced by dense fp64 mathematics.

The replacements are registered under torch's own names, so the dispatcher checks every call against the real
schema; and they insist on what the CUDA sources insist on. What is tested here is all that FlexCP adds to the
operators: which rows go in which call, where sequences begin, what is done with log-sum-exps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.reference import attend_densely, attend_in_group, random_qkv
from torch import Tensor

from flexcp.attention import group_attention
from flexcp.attention.calls import Call, one_by_one, together
from flexcp.attention.kernels import AscendKernel, EfficientKernel, FlashKernel, ascend, flash
from flexcp.attention.masks import Tile, make_tiles
from flexcp.core.layout import make_layout, windowed
from flexcp.core.plan import ExchangeKind
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.profiler.alone import AloneTransport

CPU = torch.device("cpu")
PACKS = {
    "causal": samples_from_lengths([97, 1, 40, 13, 3]),
    "full": tuple(Sample(i, n, ((0, n),)) for i, n in enumerate([61, 7, 30])),
    "mixed": (Sample(0, 90, ((5, 30), (30, 31), (60, 90))), Sample(1, 40), Sample(2, 9, ((2, 7),))),
    "below the degree": samples_from_lengths([2, 1, 5, 4]),
}


class Sequences:
    """Dense attention, sequence by sequence, as the operators define it; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def rows(self, cu_q: Any, cu_k: Any, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        self.calls += 1
        assert len(cu_q) == len(cu_k)
        assert cu_q[0] == cu_k[0] == 0
        assert (cu_q[-1], cu_k[-1]) == (len(q), len(k)), "rows that no sequence has come back undefined"
        spans = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        assert all(
            a < b and c < d for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        )
        return [(slice(a, b), slice(c, d)) for a, b, c, d in spans]

    def scores(self, q: Tensor, k: Tensor, causal: bool, scale: float, *, bottom_right: bool) -> Tensor:
        grouped = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), grouped) * scale
        shift = len(k) - len(q) if bottom_right else 0
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + shift)
        return scores.masked_fill(hidden, float("-inf")) if causal else scores

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, *, bottom_right: bool
    ) -> tuple[Tensor, Tensor]:
        """out [T, Hq, D], lse [Hq, T] of one sequence."""
        scores = self.scores(q, k, causal, scale, bottom_right=bottom_right)
        values = v.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
        scale: float, *, bottom_right: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """From an output and a log-sum-exp [Hq, T] that may be over more keys than these."""
        groups = q.shape[1] // k.shape[1]
        weights = torch.exp(
            self.scores(q, k, causal, scale, bottom_right=bottom_right) - lse.double()[..., None]
        )
        delta = (do.double() * out.double()).sum(-1).T[..., None]
        values = v.double().repeat_interleave(groups, dim=1)
        keys = k.double().repeat_interleave(groups, dim=1)
        dscores = weights * (torch.einsum("qhd,khd->hqk", do.double(), values) - delta) * scale
        dk = torch.einsum("hqk,qhd->khd", dscores, q.double()).unflatten(1, (-1, groups)).sum(2)
        dv = torch.einsum("hqk,qhd->khd", weights, do.double()).unflatten(1, (-1, groups)).sum(2)
        return torch.einsum("hqk,khd->qhd", dscores, keys), dk, dv


def check_alignment(*tensors: Tensor) -> None:
    """16 bytes are read at a time: heads of whole 16 bytes must begin at a multiple of them."""
    for x in tensors:
        if x.shape[-1] * x.element_size() % 16 == 0:
            assert x.data_ptr() % 16 == 0
            assert all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequences]:
    """torch's flash operators, on CPU, with what CUDA insists on; fp64 passes, to see the indices exactly."""
    told = Sequences()

    def check(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float, *tensors: Tensor) -> None:
        assert dropout == 0.0
        for cu, longest, least in ((cu_q, max_q, 2), (cu_k, max_k, 1)):
            assert cu.dtype == torch.int32
            assert cu.is_contiguous()
            assert longest == max(least, int(cu.diff().max()))  # of one query: another path, for decoding
        assert all(x.stride(-1) == 1 and x.dtype == tensors[0].dtype for x in tensors)
        check_alignment(*tensors)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, dropout: float,
        causal: bool, debug: bool, *, scale: float, **rest: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        check(cu_q, cu_k, max_q, max_k, dropout, q, k, v)
        out = torch.full_like(q, float("nan"))
        lse = q.new_full((q.shape[1], len(q)), float("nan"), dtype=_lse_dtype(q))
        for a, b in told.rows(cu_q.tolist(), cu_k.tolist(), q, k):
            o, stats = told.forward(q[a], k[b], v[b], causal, scale, bottom_right=True)
            out[a], lse[:, a] = o.to(q.dtype), stats.to(lse.dtype)
        return out, lse, torch.empty(2, dtype=torch.uint64), q.new_empty(0), q.new_empty(0)

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, rng: Tensor, unused: Tensor, *, scale: float,
        **rest: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        check(cu_q, cu_k, max_q, max_k, dropout, q, k, v, do, out)
        assert lse.is_contiguous()  # CUDA reads it by its pointer
        assert lse.shape == (q.shape[1], len(q))
        assert lse.dtype == _lse_dtype(q)
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        for a, b in told.rows(cu_q.tolist(), cu_k.tolist(), q, k):
            parts = told.backward(
                do[a], q[a], k[b], v[b], out[a], lse[:, a], causal, scale, bottom_right=True
            )
            for grad, rows, part in zip(grads, (a, b, b), parts, strict=True):
                grad[rows] = part.to(grad.dtype)
        return tuple(grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield told
    library._destroy()


def _lse_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@pytest.fixture
def efficient_calls() -> Iterator[Sequences]:
    """torch's memory-efficient operators, on CPU, with what CUDA insists on."""
    told = Sequences()

    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: None, cu_q: None, cu_k: None, max_q: None, max_k: None,
        dropout: float, mask: int, compute_lse: bool = False, *, scale: float, **rest: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert q.shape[2] == k.shape[2] == v.shape[2], "grouped heads are refused"
        assert compute_lse
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        check_alignment(q, k, v)
        told.calls += 1
        out, lse = told.forward(q[0], k[0], v[0], mask == 1, scale, bottom_right=mask == 2)
        padded = lse.new_full((1, len(lse), -(-q.shape[1] // 32) * 32), float("inf")).to(_lse_dtype(q))
        padded[0, :, : q.shape[1]] = lse
        state = torch.empty((), dtype=torch.int64)
        return out.to(q.dtype)[None], padded, state, state, q.shape[1], k.shape[1]

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, cu_q: None, cu_k: None,
        max_q: int, max_k: int, lse: Tensor, dropout: float, seed: Tensor, offset: Tensor, mask: int,
        bias_grad: bool, *, scale: float, **rest: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        assert q.shape[2] == k.shape[2]
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        assert out.is_contiguous()  # CUDA takes the step between its rows for granted
        check_alignment(q, k, v)
        assert lse.shape == (1, q.shape[2], -(-max_q // 32) * 32)
        assert lse[..., max_q:].eq(float("inf")).all(), "rows beyond the last must weigh nothing"
        told.calls += 1
        stats = lse[0, :, :max_q]
        parts = told.backward(
            do[0], q[0], k[0], v[0], out[0], stats, mask == 1, scale, bottom_right=mask == 2
        )
        return (*(part.to(q.dtype)[None] for part in parts), q.new_empty(()))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", forward, "CPU")
    library.impl("_efficient_attention_backward", backward, "CPU")
    yield told
    library._destroy()


@pytest.fixture
def ascend_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sequences]:
    """A torch_npu with the two operators, their documented arguments, and nothing else."""
    told = Sequences()

    def hides(sparse_mode: int, atten_mask: Tensor | None) -> bool:
        assert (sparse_mode == 3) == (atten_mask is not None)
        assert sparse_mode in (0, 3)
        if atten_mask is not None:
            assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        return sparse_mode == 3

    def forward(
        q: Tensor, k: Tensor, v: Tensor, head_num: int, input_layout: str, *, scale: float, keep_prob: float,
        actual_seq_qlen: list[int], actual_seq_kvlen: list[int], sparse_mode: int, atten_mask: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (head_num, input_layout, keep_prob) == (q.shape[1], "TND", 1.0)
        causal = hides(sparse_mode, atten_mask)
        out, lse = torch.full_like(q, float("nan")), q.new_empty(len(q), q.shape[1], dtype=_lse_dtype(q))
        for a, b in told.rows([0, *actual_seq_qlen], [0, *actual_seq_kvlen], q, k):
            o, stats = told.forward(q[a], k[b], v[b], causal, scale, bottom_right=True)
            out[a], lse[a] = o.to(q.dtype), stats.T.to(lse.dtype)
        maxima = (lse - 1.5).unsqueeze(-1).repeat(1, 1, 8)
        return out, maxima, torch.full_like(maxima, 1.5).exp(), None, 0, 0, 0

    def backward(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, head_num: int, input_layout: str, *, softmax_max: Tensor,
        softmax_sum: Tensor, attention_in: Tensor, scale_value: float, keep_prob: float,
        actual_seq_qlen: list[int], actual_seq_kvlen: list[int], sparse_mode: int, atten_mask: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        causal = hides(sparse_mode, atten_mask)
        assert softmax_max.shape == softmax_sum.shape == (len(q), q.shape[1], 8)
        lse = (softmax_max + softmax_sum.log())[..., 3].T
        grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        for a, b in told.rows([0, *actual_seq_qlen], [0, *actual_seq_kvlen], q, k):
            parts = told.backward(
                do[a], q[a], k[b], v[b], attention_in[a], lse[:, a], causal, scale_value, bottom_right=True
            )
            for grad, rows, part in zip(grads, (a, b, b), parts, strict=True):
                grad[rows] = part.to(grad.dtype)
        return (*grads, None)

    module = ModuleType("torch_npu")
    module.npu_fusion_attention = forward
    module.npu_fusion_attention_grad = backward
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    yield told
    ascend._hidden.cache_clear()


KERNELS = {"flash_calls": FlashKernel, "efficient_calls": EfficientKernel, "ascend_calls": AscendKernel}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("operators", KERNELS)
def test_values_and_gradients_equal_dense_attention(
    operators: str, degree: int, pack: str, request: pytest.FixtureRequest
) -> None:
    """Packs, spans, grouped heads, odd lengths, samples below the degree, whole ones; by every exchange."""
    told, kernel = request.getfixturevalue(operators), KERNELS[operators]()
    kinds: list[ExchangeKind] = ["ring", "gather", "all-to-all"]
    for whole_below_tokens, kind in product((0, 20), kinds if degree == 3 else kinds[:1]):
        layout = make_layout(PACKS[pack], degree, whole_below_tokens)
        rows = sum(sample.tokens for sample in layout.samples)
        tensors = random_qkv(rows, 6, 6 if kind == "all-to-all" else 2)
        got = attend_in_group(*tensors, layout, kernel, kind)
        errors = got.errors(attend_densely(*tensors, layout.samples))
        assert all(error <= 1e-12 for error in errors.values()), (kind, errors)
    assert told.calls


@pytest.mark.parametrize("operators", KERNELS)
def test_narrow_dtypes_pass_through(operators: str, request: pytest.FixtureRequest) -> None:
    """bf16 in, bf16 out, log-sum-exp in fp32 both ways: the operators refuse anything else."""
    request.getfixturevalue(operators)
    layout = make_layout(PACKS["mixed"], 3, 20)
    tensors = random_qkv(139, 6, 2, 8, torch.bfloat16)
    errors = attend_in_group(*tensors, layout, KERNELS[operators]()).errors(
        attend_densely(*tensors, layout.samples)
    )
    assert all(error <= 2e-2 for error in errors.values()), errors


@pytest.mark.parametrize("kind", ["ring", "gather", "all-to-all"])
@pytest.mark.parametrize("operators", KERNELS)
def test_heads_first_tensors_give_the_same(
    operators: str, kind: ExchangeKind, request: pytest.FixtureRequest
) -> None:
    """As models hand them over: views of [Hq, T, D]."""
    request.getfixturevalue(operators)
    kernel, layout = KERNELS[operators](), make_layout(PACKS["mixed"], 3, 20)
    tensors = random_qkv(139, 6, 3, 8, torch.bfloat16)
    same = attend_in_group(*tensors, layout, kernel, kind)
    got = attend_in_group(
        *tensors, layout, kernel, kind, stored=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)
    )
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(same, name)), name


def test_efficient_attention_gets_rows_of_an_output_one_after_the_other(efficient_calls: Sequences) -> None:
    """Whoever added it up may have laid it out by heads."""
    q, k, v, do = random_qkv(9, 4, 2)
    out, lse = EfficientKernel().forward(q, k, v, True, 0.3)
    by_heads = out.transpose(0, 1).contiguous().transpose(0, 1)
    grads = [EfficientKernel().backward(do, q, k, v, x, lse, True, 0.3) for x in (out, by_heads)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


@pytest.mark.parametrize("operators", KERNELS)
def test_a_gradient_that_is_one_number_everywhere(operators: str, request: pytest.FixtureRequest) -> None:
    """It has no step between its elements, and kernels want one of 1."""
    request.getfixturevalue(operators)
    layout = make_layout(PACKS["causal"], 1, 0)
    *inputs, do = random_qkv(154)
    leaves = [x.requires_grad_() for x in inputs]
    out = group_attention(*leaves, layout, AloneTransport().exchange(range(1)), kernel=KERNELS[operators]())
    got = torch.autograd.grad(out.sum(), leaves)
    want = attend_densely(*inputs, torch.ones_like(do), layout.samples)
    torch.testing.assert_close(got, (want.dq, want.dk, want.dv), rtol=0, atol=1e-12)


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 8])
def test_a_ring_step_of_causal_samples_is_one_call(degree: int) -> None:
    """However many samples: step 0 one causal call without a copy, later steps one full call each."""
    layout = make_layout(samples_from_lengths([640, 77, 130, 300, 16]), degree, 100)
    for member in range(degree):
        [own] = together(make_tiles(layout, member, member), CPU)
        assert own.causal
        assert own.q == own.k == slice(0, layout.rows(member))
        assert own.bounds is not None
        assert own.bounds.q_stops == own.bounds.k_stops  # squares: both alignments of a causal mask agree
        for other in set(range(degree)) - {member}:
            [call] = together(make_tiles(layout, member, other), CPU)
            assert not call.causal
            # all rows see the first keys of an earlier member, the later rows all of a later one
            assert isinstance(call.q if other < member else call.k, slice)


def spread(call: Call) -> list[tuple[int, int]]:
    """The entries of a call, from its rows and bounds alone."""
    rows = [r if isinstance(r, Tensor) else torch.arange(r.start, r.stop) for r in (call.q, call.k)]
    assert call.bounds is not None
    entries = []
    q0 = k0 = 0
    for q1, k1 in zip(call.bounds.q_stops, call.bounds.k_stops, strict=True):
        for i, q in enumerate(rows[0][q0:q1].tolist()):
            keys = rows[1][k0:k1].tolist()
            entries += [(q, k) for j, k in enumerate(keys) if not call.causal or j <= i]
        q0, k0 = q1, k1
    assert (q0, k0) == (len(rows[0]), len(rows[1]))
    assert all(len(set(r.tolist())) == len(r) for r in rows), "a row twice: sums would race"
    return entries


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_calls_hold_every_entry_of_the_tiles_once(degree: int, pack: str) -> None:
    """Also under a window, whose turned tiles are rows from the last to the first."""
    for whole_below_tokens, window in ((0, 1000), (20, 1000), (0, 7)):
        layout = windowed(make_layout(PACKS[pack], degree, whole_below_tokens), window)
        for member in range(degree):
            for other in range(degree):
                tiles = make_tiles(layout, member, other)
                calls = together(tiles, CPU)
                want = [
                    (q, k)
                    for t in tiles
                    for q in range(t.q0, t.q1)
                    for k in range(t.k0, t.k1)
                    if not t.causal or (k - t.k0 >= q - t.q0 if t.turned else k - t.k0 <= q - t.q0)
                ]
                got = [entry for call in calls for entry in spread(call)]
                assert sorted(got) == sorted(want)
                assert len(calls) <= len(one_by_one(tiles, CPU))
                for call in calls:
                    assert call.bounds is not None
                    assert call.bounds.cu_q.tolist() == [0, *call.bounds.q_stops]
                    assert call.bounds.cu_k.tolist() == [0, *call.bounds.k_stops]


def test_calls_are_made_once() -> None:
    """Layers ask again and again; tables are on the device by then."""
    tiles = Tile(2, 4, 0, 4, False), Tile(5, 6, 4, 6, False)
    assert together(tiles, CPU) is together((Tile(2, 4, 0, 4, False), Tile(5, 6, 4, 6, False)), CPU)


def test_a_log_sum_exp_of_another_shape_is_refused(flash_calls: Sequences) -> None:
    """Rows first would be read as heads first, wherever the numbers happen to agree."""
    from flexcp.core.errors import UnsupportedError

    q, k, v, _ = random_qkv(6, 2, 2)
    forward = torch.ops.aten._flash_attention_forward

    class RowsFirst:
        @staticmethod
        def _flash_attention_forward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            out, lse, *rest = forward(*args, **options)
            return (out, lse.T, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash.torch.ops, "aten", RowsFirst)
        with pytest.raises(UnsupportedError, match=r"a log-sum-exp \(6, 2\) for 6 rows and 2 heads"):
            FlashKernel().forward(q, k, v, True, 0.3)
