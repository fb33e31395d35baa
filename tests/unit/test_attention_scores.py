"""Windows, capped scores and sinks, one by one and together, against dense softmax in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.reference import (
    ThreadExchange,
    dense_attention,
    gather,
    random_qkv,
    relative_error,
    run_members,
    scatter,
)
from torch import Tensor

from flexcp.attention import group_attention, kernel_for
from flexcp.attention.kernels import DenseKernel, dense
from flexcp.core.errors import InputError
from flexcp.core.layout import Layout, make_layout
from flexcp.core.plan import EXCHANGE_KINDS, ExchangeKind
from flexcp.core.sample import Sample
from flexcp.profiler.alone import AloneTransport

PACK = (Sample(0, 37), Sample(1, 5), Sample(2, 1), Sample(3, 29, spans=((4, 11), (20, 23))), Sample(4, 18))
HEADS, KV_HEADS = 12, 6  # which 2, 3 and 6 ranks can share
SINKS = torch.linspace(-2.0, 3.0, HEADS, dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 7},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": SINKS},
    "all of them": {"window": 4, "softcap": 1.3, "sinks": SINKS},
}


def run(
    tensors: tuple[Tensor, ...], layout: Layout, kind: ExchangeKind, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Output and gradients of a group; those of the sinks added up over its members."""
    shards = [scatter(x, layout) for x in tensors]

    def work(exchange: ThreadExchange) -> tuple[Tensor, ...]:
        *inputs, grad = (parts[exchange.member] for parts in shards)
        leaves = [x.clone().requires_grad_() for x in inputs]
        given = dict(options)
        if "sinks" in given:
            leaves.append(given["sinks"].clone().requires_grad_())
            given["sinks"] = leaves[-1]
        out = group_attention(*leaves[:3], layout, exchange, **given)
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    by_name = zip(*run_members(layout.degree, work, kind), strict=True)
    found = dict(zip(("out", "dq", "dk", "dv", "dsinks"), by_name, strict=False))
    return {n: sum(p) if n == "dsinks" else gather(p, layout) for n, p in found.items()}  # type: ignore[misc]


def densely(tensors: tuple[Tensor, ...], layout: Layout, options: dict[str, Any]) -> dict[str, Tensor]:
    """The same by definition, in one process."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    given = dict(options)
    if "sinks" in given:
        leaves.append(given["sinks"].clone().requires_grad_())
        given["sinks"] = leaves[-1]
    out, _ = dense_attention(*leaves[:3], layout.samples, **given)
    grads = torch.autograd.grad(out, leaves, tensors[3])
    return dict(zip(("out", "dq", "dk", "dv", "dsinks"), (out.detach(), *grads), strict=False))


@pytest.mark.parametrize("kind", EXCHANGE_KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_at_every_degree(options: dict[str, Any], kind: ExchangeKind) -> None:
    """D44, D46, D50: degrees 1, 2, 3 and 6, samples cut and whole, spans, a sample of one row."""
    tensors = random_qkv(sum(sample.tokens for sample in PACK), HEADS, KV_HEADS)
    plain = densely(tensors, make_layout(PACK, 1, 0), {})
    for degree, whole_below in ((1, 0), (2, 0), (3, 6), (6, 0)):
        layout = make_layout(PACK, degree, whole_below)
        want = densely(tensors, layout, options)
        got = run(tensors, layout, kind, options)
        assert got.keys() == want.keys()
        for name, expected in want.items():
            assert relative_error(got[name], expected) <= 1e-12, (degree, name)
        assert relative_error(got["out"], plain["out"]) > 1e-2  # the option does something


def test_rows_of_few_keys_are_done_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are bounded in memory, and what is computed does not depend on it."""
    q, k, v, do = random_qkv(23, 4, 2)
    kernel = DenseKernel(softcap=1.5)
    for causal in (True, False):
        out, lse = kernel.forward(q, k, v, causal, 0.3)
        whole = (out, lse, *kernel.backward(do, q, k, v, out, lse, causal, 0.3))
        monkeypatch.setattr(dense, "_CHUNK_SCORES", 5 * 4 * 23)
        out, lse = kernel.forward(q, k, v, causal, 0.3)
        parts = (out, lse, *kernel.backward(do, q, k, v, out, lse, causal, 0.3))
        monkeypatch.undo()
        assert all(relative_error(a, b) <= 1e-14 for a, b in zip(parts, whole, strict=True))


def test_wrong_options_are_refused() -> None:
    q, k, v, _ = random_qkv(9, 4, 2)
    layout = make_layout((Sample(0, 9),), 1, 0)

    def refused(**options: Any) -> str:
        def work(exchange: ThreadExchange) -> str:
            with pytest.raises(InputError) as caught:
                group_attention(q, k, v, layout, exchange, **options)
            return str(caught.value)

        return run_members(1, work)[0]

    kernel = kernel_for(q.device, q.dtype, q.shape[-1])
    assert refused(window=0) == "the attention window is 0\nA row sees at least itself: 1 or more."
    assert refused(sinks=torch.zeros(2)) == "there are (2,) sinks for 4 query heads\nGive one a head."
    assert refused(kernel=kernel, softcap=1.0) == (
        "a kernel and a softcap are both given\nGive a kernel that caps, or the softcap."
    )


@pytest.mark.parametrize("kind", EXCHANGE_KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_autocast_does_not_reach_into_kernels(options: dict[str, Any], kind: ExchangeKind) -> None:
    """It would round the scores of those that form them, and in the forward pass alone."""
    layout = make_layout(PACK, 3, 0)
    tensors = random_qkv(layout.rows(0), HEADS, KV_HEADS, 16, torch.bfloat16)
    given = {name: value.float() if name == "sinks" else value for name, value in options.items()}
    found = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = group_attention(*leaves, layout, AloneTransport().exchange(range(3), kind), **given)
        found.append([out, *torch.autograd.grad(out, leaves, tensors[3])])
    for plain, cast in zip(*found, strict=True):
        assert torch.equal(plain, cast)
