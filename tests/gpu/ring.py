"""Shards of a d-way ring, one at a time, against one call over the same work; and what a step waits for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from flexcp.attention import group_attention, kernel_for
from flexcp.attention.merge import merge_
from flexcp.core.layout import make_layout
from flexcp.core.sample import samples_from_lengths
from flexcp.profiler.alone import AloneTransport
from tests.gpu.common import Place, Row, seconds_of, too_late


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


def check_ring(place: Place) -> list[Row]:
    """Efficiency: time of one call over the whole, over d times that of a shard. Reported, not judged."""
    sizes = _Sizes(place)
    rows = []
    for tokens in sizes.lengths:
        if not place.left_s:
            return [*rows, too_late(f"ring, {tokens}")]
        times = [
            seconds_of(attention_of_member(place, sizes, tokens, d), place.device, sizes.repeats)
            for d in sizes.degrees
        ]
        ratios = ", ".join(
            f"{times[0] / (d * t):.2f}" for d, t in zip(sizes.degrees, times, strict=True) if d > 1
        )
        span = f"{sizes.degrees[1]}-{sizes.degrees[-1]}"
        rows.append(Row(f"ring of {span} over one call, {tokens}", f"{ratios}; d=1 {1e3 * times[0]:.1f} ms"))
    rows.append(_merge_share(place, sizes))
    if not place.is_cpu:
        rows += _waits_and_allocations(place, sizes)
    return rows


def _merge_share(place: Place, sizes: _Sizes) -> Row:
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
    return Row(f"merge over its tile, {rows} rows", f"{merge_s / tile_s:.1%}")


def _waits_and_allocations(place: Place, sizes: _Sizes) -> list[Row]:
    """After a first pass: no operation that makes the host wait, and no memory asked of the device.

    The member's messages come from itself, so nothing is shown of NCCL.
    """
    work = attention_of_member(place, sizes, sizes.lengths[0], 4)
    for _ in range(3):
        work()
    torch.accelerator.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    waits = ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            work()
    except RuntimeError as error:
        waits = str(error).splitlines()[0]
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")
    asked = torch.cuda.memory_stats()["num_device_alloc"] - before
    return [
        Row("host waits in a ring of 4, without NCCL", waits or "none", not waits),
        Row("device allocations in it, without NCCL", str(asked), asked == 0),
    ]
