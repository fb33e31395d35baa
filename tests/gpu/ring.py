"""Shards of a d-way ring, one at a time, against one call over the same work; and what a step waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from flexcp.attention import group_attention, kernel_for
from flexcp.attention.merge import merge_
from flexcp.core.layout import make_layout
from flexcp.core.sample import samples_from_lengths
from flexcp.profiler.alone import AloneTransport
from tests.gpu.common import Place, Row, attempt, seconds_of, synchronize, too_late
from tests.waits import first_wait


class _Sizes:
    """Heads and lengths of the long and of the quick form."""

    def __init__(self, place: Place) -> None:
        self.dtype = torch.float32 if place.is_cpu else torch.bfloat16
        self.heads, self.kv_heads, self.width = (4, 2, 32) if place.quick else (32, 8, 128)
        self.lengths = (1024,) if place.quick else (8192, 32_768, 131_072)
        self.degrees = (1, 2, 3) if place.quick else tuple(range(1, 9))
        self.repeats = 1 if place.quick else 3


def attention_of_member(place: Place, sizes: _Sizes, tokens: int, degree: int) -> Callable[[], Any]:
    """Forward and backward of member 0, whose messages come from itself."""
    layout = make_layout(samples_from_lengths([tokens]), degree, 0)
    rows = layout.rows(0)
    shapes = [(rows, n, sizes.width) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)]
    q, k, v, do = (torch.randn(shape, device=place.device, dtype=sizes.dtype) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exchange = AloneTransport().exchange(range(degree))

    def work() -> Any:
        out = group_attention(*leaves, layout, exchange)  # type: ignore[arg-type]
        return torch.autograd.grad(out, leaves, do)

    return work


def check_ring(place: Place) -> Iterator[Row]:
    """What shards cost beside one call, what merging does, and whether the host waits."""
    sizes = _Sizes(place)
    for tokens in sizes.lengths:
        name = f"ring of {sizes.degrees[1]}-{sizes.degrees[-1]} over one call, {tokens}"
        if place.left_s:
            yield from attempt(name, partial(_efficiency, name, place, sizes, tokens))
        else:
            yield too_late(name)
    if place.left_s:
        yield from attempt("merge over its tile", partial(_merge_share, place, sizes))
        yield from attempt("host waits", partial(_waits_and_allocations, place, sizes))


def _efficiency(name: str, place: Place, sizes: _Sizes, tokens: int) -> Iterator[Row]:
    """Time of one call over the whole, over d times that of a shard. Reported, not judged."""
    times = [
        seconds_of(attention_of_member(place, sizes, tokens, d), place.device, sizes.repeats)
        for d in sizes.degrees
    ]
    ratios = ", ".join(
        f"{times[0] / (d * t):.2f}" for d, t in zip(sizes.degrees, times, strict=True) if d > 1
    )
    yield Row(name, f"{ratios}; d=1 {1e3 * times[0]:.1f} ms")


def _merge_share(place: Place, sizes: _Sizes) -> Iterator[Row]:
    """What merging costs beside the full tile that it follows: whether to fuse it is read off here."""
    rows = sizes.lengths[0] // 2
    q, k, v = (
        torch.randn(rows, n, sizes.width, device=place.device, dtype=sizes.dtype)
        for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    kernel = kernel_for(place.device, sizes.dtype, sizes.width)
    out, lse = kernel.forward(q, k, v, False, 0.1)
    total, total_lse = out.float(), lse.float().clone()
    tile_s = seconds_of(lambda: kernel.forward(q, k, v, False, 0.1), place.device)
    merge_s = seconds_of(lambda: merge_(total, total_lse, out, lse), place.device)
    yield Row(f"merge over its tile, {rows} rows", f"{merge_s / tile_s:.1%}")


def _waits_and_allocations(place: Place, sizes: _Sizes) -> Iterator[Row]:
    """After a first pass: no operation that makes the host wait, and no memory asked of the device.

    The member's messages come from itself, so nothing is shown of NCCL.
    """
    work = attention_of_member(place, sizes, sizes.lengths[0], 4)
    for _ in range(3):
        work()
    synchronize(place.device)
    before = _allocations(place)
    waits = first_wait(lambda: [work() for _ in range(3)], place.device)
    yield Row("host waits in a ring of 4, without NCCL", waits or "none", not waits)
    if not place.is_cpu:
        asked = _allocations(place) - before
        yield Row("device allocations in it, without NCCL", str(asked), asked == 0)


def _allocations(place: Place) -> int:
    return 0 if place.is_cpu else int(torch.cuda.memory_stats()["num_device_alloc"])
