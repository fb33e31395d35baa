"""Between kernels and torch: operators in the form that they are called in, and which kernel serves what."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flexcp.attention import kernel_for
from flexcp.attention import kernels as table
from flexcp.attention.calls import Bounds
from flexcp.attention.kernels import (
    CpuKernel,
    DenseKernel,
    EfficientKernel,
    FlashKernel,
    Kernel,
    efficient,
    flash,
)
from flexcp.attention.kernels.schema import mismatch
from flexcp.attention.upload import upload

CPU = torch.device("cpu")


def test_this_torch_has_the_operators_in_the_form_that_is_called() -> None:
    """Schemas are registered in CPU builds too."""
    assert [flash.why_not(), efficient.why_not()] == ["", ""]


def test_an_operator_of_another_form_is_noticed() -> None:
    assert mismatch("mm", ["self Tensor", "mat2 Tensor", "x int"]) == "aten::mm takes 2 arguments, not 3"
    assert mismatch("mm", ["mat2 Tensor", "self Tensor"]) == "aten::mm takes self Tensor, not mat2 Tensor"
    assert mismatch("add", ["self Tensor", "other Tensor"], ["beta"]) == "aten::add takes no beta"
    assert mismatch("mm", ["self Tensor", "mat2 Tensor"], [], ["int"]) == "aten::mm returns ['Tensor']"
    assert mismatch("no_such_operator", []) == "there is no aten::no_such_operator"


def test_the_table_serves_cuda_by_dtype_and_width(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flash where it can, efficient attention where heads are whole 16 bytes, else and in fp64 dense."""
    device, capability = torch.device("cuda", 0), [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])

    def served(dtype: torch.dtype, width: int) -> type[Kernel]:
        kernel_for.cache_clear()
        return type(kernel_for(device, dtype, width))

    for dtype in (torch.bfloat16, torch.float16):
        assert [served(dtype, width) for width in (64, 128, 256)] == [FlashKernel] * 3
        assert [served(dtype, width) for width in (264, 320)] == [EfficientKernel] * 2
        assert [served(dtype, width) for width in (7, 100, 260)] == [DenseKernel] * 3
    assert [served(torch.float32, width) for width in (4, 100, 128, 300)] == [EfficientKernel] * 4
    assert [served(torch.float32, width) for width in (7, 50)] == [DenseKernel] * 2
    assert served(torch.float64, 128) is DenseKernel
    capability[0] = (7, 5)
    assert [served(dtype, 128) for dtype in (torch.float16, torch.float32)] == [EfficientKernel] * 2
    assert served(torch.bfloat16, 128) is DenseKernel
    entries = [(place, kernel, "aten::x wants y as well") for place, kernel, _ in table._TABLE]
    monkeypatch.setattr(table, "_TABLE", entries)
    with caplog.at_level(logging.WARNING):
        assert served(torch.bfloat16, 128) is DenseKernel
    assert "FlashKernel: aten::x wants y as well; EfficientKernel: aten::x wants y as well" in caplog.text
    monkeypatch.undo()
    kernel_for.cache_clear()
    assert type(kernel_for(CPU, torch.bfloat16, 128)) is CpuKernel


class Watch(TorchDispatchMode):
    """Notes the log-sum-exps that attention operators give and take: shape, dtype, whether contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        out = func(*args, **(kwargs or {}))
        if "attention" in func.name():
            told = dict(zip(names, args, strict=False)).get("logsumexp", out[1])
            self.seen[func.name()] = tuple(told.shape), told.dtype, told.is_contiguous()
        return out


@pytest.mark.parametrize(("rows", "heads"), [(4, 4), (5, 2)])
def test_torch_takes_both_passes_of_flash_by_its_own_shapes(rows: int, heads: int) -> None:
    """By its shape functions for CUDA. Log-sum-exps are heads first: 4 x 4 cannot be told by shape."""
    shapes = [(rows, n, 64) for n in (heads, heads // 2, heads // 2, heads)]
    q, k, v, do = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    bounds = Bounds((rows,), (rows,), cu, cu, rows, rows)
    with Watch() as watch:
        out, lse = FlashKernel().forward_packed(q, k, v, bounds, True, 0.1)
        grads = FlashKernel().backward_packed(do, q, k, v, out, lse, bounds, True, 0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (rows, heads), torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}
    assert watch.seen == {
        "aten::_flash_attention_forward": ((heads, rows), torch.float32, True),
        "aten::_flash_attention_backward": ((heads, rows), torch.float32, True),
    }


@pytest.mark.parametrize(("rows", "heads"), [(32, 32), (5, 2)])
def test_torch_takes_efficient_attention_by_its_own_shapes(rows: int, heads: int) -> None:
    """Forward alone: torch 2.13 has a shape function of the backward pass that lacks an argument."""
    shapes = [(rows, n, 100) for n in (heads, heads // 2, heads // 2)]
    q, k, v = (torch.empty(shape, device="meta") for shape in shapes)
    with Watch() as watch:
        out, lse = EfficientKernel().forward(q, k, v, True, 0.1)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (rows, heads), torch.float32)
    assert watch.seen == {"aten::_efficient_attention_forward": ((1, heads, 32), torch.float32, True)}


def test_tables_are_uploaded_without_a_wait_of_the_host() -> None:
    """From pinned memory, and not waited for; on the CPU there is nothing to do."""

    class Table:
        pinned = False

        def pin_memory(self) -> Table:
            self.pinned = True
            return self

        def to(self, device: torch.device, *, non_blocking: bool = False) -> tuple[str, bool, bool]:
            return device.type, self.pinned, non_blocking

    assert upload(Table(), torch.device("cuda", 0)) == ("cuda", True, True)  # type: ignore[arg-type]
    assert upload(Table(), CPU) == ("cpu", False, False)  # type: ignore[arg-type]
