"""Passes of every exchange on devices that are not there: no values, but torch's schemas and shapes.

Fake tensors refuse to mix devices, so a table that was left on the host is noticed. They want a torch that
was built for CUDA, not a GPU; on the device `meta` every torch takes the same path. Below autograd, which
would look for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flexcp.attention import calls, kernel_for, route
from flexcp.attention.group import _METHODS
from flexcp.attention.kernels import DenseKernel, EfficientKernel, FlashKernel, Kernel, flash, packed
from flexcp.core.layout import make_layout
from flexcp.core.plan import ExchangeKind
from flexcp.core.sample import Sample
from flexcp.profiler.alone import AloneTransport

PACK = (Sample(0, 90, ((5, 30), (30, 31), (60, 90))), Sample(1, 40), Sample(2, 9, ((2, 7),)))
CUDA = torch.device("cuda", 0)
CACHES = (
    calls.one_by_one, calls.together, route.rows_by_sample,
    packed._one_tile, flash._no_random_state, kernel_for,
)  # fmt: skip


@pytest.fixture(params=["meta", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where tables are made anew, and are not left for the next."""
    if request.param == "cuda" and not torch.backends.cuda.is_built():
        pytest.skip("this torch was built without CUDA: fake tensors of it cannot be cut")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)  # fake tensors know no such memory
    for cache in CACHES:
        cache.cache_clear()
    yield CUDA if request.param == "cuda" else torch.device("meta")
    for cache in CACHES:
        cache.cache_clear()


def passes(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    degree: int,
    kind: ExchangeKind,
    kernel: Kernel,
    forward_only: bool = False,
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v and out; and tensors that are like them: the gradients of the first three, and q."""
    mode: AbstractContextManager[object] = FakeTensorMode() if device.type == "cuda" else nullcontext()
    layout = make_layout(PACK, degree, 20)
    with mode:
        q, k, v, do = (
            torch.empty(layout.rows(0), n, width, dtype=dtype, device=device) for n in (6, 3, 3, 6)
        )
        exchange = AloneTransport().exchange(range(degree), kind)
        out, saved = _METHODS[kind].forward(q, k, v, layout, exchange, kernel, 0.1)
        if forward_only:
            return [out], [q]
        *grads, _ = _METHODS[kind].backward(do, saved, layout, exchange, kernel, 0.1)
    return [q, k, v, out], [*grads, q]


def forms(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(x.shape, x.dtype, x.device) for x in tensors]


@pytest.mark.parametrize("kind", ["ring", "gather", "all-to-all"])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.float16, 256)], ids=str)
def test_flash_takes_both_passes(
    device: torch.device, dtype: torch.dtype, width: int, degree: int, kind: ExchangeKind
) -> None:
    """Spans, samples below the degree, grouped heads: each call by torch's schema and shape functions."""
    values, alike = passes(device, dtype, width, degree, kind, FlashKernel())
    assert forms(values) == forms(alike)


def test_so_do_the_others(device: torch.device) -> None:
    """Dense attention both; of efficient attention torch has no right shape function of the second."""
    kernels = [kernel_for(CUDA, dtype, 64) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    assert [type(kernel) for kernel in kernels] == [FlashKernel, EfficientKernel, DenseKernel]
    for values, alike in (
        passes(device, torch.float32, 64, 3, "ring", kernels[1], forward_only=True),
        passes(device, torch.float64, 64, 3, "ring", kernels[2]),
    ):
        assert forms(values) == forms(alike)
