"""Every kernel entry against dense fp64: a tile at a time, and through the groups that use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from flexcp.attention.group import _METHODS
from flexcp.attention.kernels import (
    CpuKernel,
    DenseKernel,
    EfficientKernel,
    FlashKernel,
    efficient,
    flash,
    kernel_for,
)
from flexcp.core.layout import Layout, make_layout, windowed
from flexcp.core.plan import ExchangeKind
from flexcp.core.sample import Sample, samples_from_lengths
from tests.gpu.common import Place, Row, attempt, judged, too_late
from tests.reference import (
    Attended,
    ThreadExchange,
    dense_attention,
    gather,
    random_qkv,
    run_members,
    scatter,
)

# Largest difference over the largest value. 8 bits of bf16 are 2e-3 a rounding, and a gradient has a few.
BANDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
PACKS = {
    "causal": samples_from_lengths([397, 1, 140, 33, 129]),
    "mixed": (Sample(0, 290, ((5, 130), (130, 131), (200, 290))), Sample(1, 40), Sample(2, 99, ((2, 77),))),
    "full": tuple(Sample(i, n, ((0, n),)) for i, n in enumerate([161, 7, 230])),
    "single rows": samples_from_lengths([1, 1, 1, 2]),
    "one row each": samples_from_lengths([1, 1, 1]),
}


def entries(place: Place) -> Iterator[tuple[str, Any, torch.dtype, tuple[int, ...]]]:
    """Name, kernel, dtype and head widths."""
    if place.is_cpu:
        yield "cpu fp32", CpuKernel(), torch.float32, (64,)
        yield "cpu bf16", CpuKernel(), torch.bfloat16, (40,)
        return
    wide = (64, 128, 256)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield f"flash {name}", FlashKernel(), dtype, wide
        yield f"efficient {name}, wide heads", EfficientKernel(), dtype, (264, 320)
        yield f"dense {name}, odd widths", DenseKernel(), dtype, (7, 100)
    yield "efficient fp32", EfficientKernel(), torch.float32, (*wide, 100)
    yield "dense fp32, odd widths", DenseKernel(), torch.float32, (7,)
    yield "dense fp64", DenseKernel(), torch.float64, (64,)


def check_kernels(place: Place) -> Iterator[Row]:
    """One row an entry: its worst error of out, lse, dq, dk and dv over all cases."""
    for name, reason in _operators():
        yield Row(f"operators of {name}", reason or "as called", not reason)
    for name, *entry in entries(place):
        if place.left_s:
            yield from attempt(name, partial(_rows_of, place, name, *entry))
        else:
            yield too_late(name)


def _rows_of(
    place: Place, name: str, kernel: Any, dtype: torch.dtype, widths: tuple[int, ...]
) -> Iterator[Row]:
    chosen = {type(kernel_for(place.device, dtype, width)) for width in widths}
    if not all(isinstance(kernel, kind) for kind in chosen):
        names = ", ".join(sorted(kind.__name__ for kind in chosen))
        yield Row(name, f"the table chooses {names}", ok=False)
    worst = max(_errors(place, kernel, dtype, width) for width in widths)
    yield judged(f"{name} x {'/'.join(map(str, widths))}", worst, BANDS[dtype])


def _operators() -> list[tuple[str, str]]:
    return [("flash", flash.why_not()), ("efficient", efficient.why_not())]


def _errors(place: Place, kernel: Any, dtype: torch.dtype, width: int) -> float:
    """Tiles, then packs of samples: by all exchanges, at several degrees, with a window, heads grouped."""
    worst = [_lse_error(place, kernel, dtype, width, *case) for case in ((8, 8), (65, 4), (1, 8), (130, 2))]
    kinds: list[ExchangeKind] = ["ring", "gather", "all-to-all"]
    packs = {"mixed": PACKS["mixed"]} if place.quick else PACKS
    for (pack, samples), degree in product(packs.items(), (1, 3) if place.quick else (1, 2, 3, 5)):
        special = (pack, degree) == ("mixed", 3)
        for kind, window in [*product(kinds, (None,)), ("ring", 50)] if special else [(kinds[0], None)]:
            layout = make_layout(samples, degree, 20)
            layout = layout if window is None else windowed(layout, window)
            kv_heads = 3 if kind == "all-to-all" else 2
            tensors = random_qkv(sum(s.tokens for s in samples), 6, kv_heads, width, dtype)
            got = _attend([x.to(place.device) for x in tensors], layout, kernel, kind)
            worst += got.errors(_expected(*tensors, samples, window)).values()
    return max(float("inf") if error != error else error for error in worst)


def _attend(tensors: list[Tensor], layout: Layout, kernel: Any, kind: ExchangeKind) -> Attended:
    """All members as threads on one device, below autograd: it has one thread a device, where they would wait
    for each other for ever."""
    shards = [scatter(x, layout) for x in tensors]
    method = _METHODS[kind]

    def work(exchange: ThreadExchange) -> list[Tensor]:
        q, k, v, do = (parts[exchange.member] for parts in shards)
        scale = q.shape[-1] ** -0.5
        out, saved = method.forward(q, k, v, layout, exchange, kernel, scale)
        dq, dk, dv, _ = method.backward(do, saved, layout, exchange, kernel, scale)
        return [x.cpu() for x in (out, dq, dk, dv)]

    threads = torch.get_num_threads()
    members = run_members(layout.degree, work, kind)
    torch.set_num_threads(threads)  # members take one each, and the reference wants all
    return Attended(*(gather(parts, layout) for parts in zip(*members, strict=True)))


def _expected(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, samples: Sequence[Sample], window: int | None
) -> Attended:
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*leaves, samples, window=window)
    return Attended(out.detach(), *torch.autograd.grad(out, leaves, do.double()))


def _lse_error(place: Place, kernel: Any, dtype: torch.dtype, width: int, rows: int, heads: int) -> float:
    """Also with as many rows as heads, where shapes alone could not tell one layout from the other."""
    q, k, v, _ = random_qkv(rows, heads, heads, width, dtype)
    there: list[Tensor] = [x.to(place.device) for x in (q, k, v)]
    out, lse = kernel.forward(*there, True, 0.2)
    want_out, want_lse = dense_attention(q, k, v, [Sample(0, rows)], 0.2)
    assert lse.shape == (rows, heads)
    errors = [(got.cpu().double() - want).abs().max() for got, want in ((out, want_out), (lse, want_lse))]
    return float(max(errors[0] / want_out.abs().max(), errors[1] / want_lse.abs().max().clamp_min(1.0)))
