"""Lets Megatron-Core run where there is no GPU: what it places on `cuda` is placed on the CPU.

Changes where tensors live, never what is computed from them. Only for tests, only in processes of their own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def install() -> None:
    """Call before the first import of megatron."""
    torch.compile = lambda function, **_: function  # type: ignore[assignment]  # the compiler takes 10 s to import
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
        module.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.synchronize = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_stream = lambda *_: _Nothing()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    _OnCpu().__enter__()
    dist.all_to_all_single = _with_plain_sizes(dist.all_to_all_single)
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # a name that is undefined without Transformer Engine


def _with_plain_sizes(function: Any) -> Any:
    """Megatron passes sizes of NumPy, which NCCL takes and gloo does not."""

    def all_to_all_single(*args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if kwargs.get(name) is not None:
                kwargs[name] = [int(size) for size in kwargs[name]]
        return function(*args, **kwargs)

    return all_to_all_single


class _Nothing:
    """A stream or an event of a device that runs everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Nothing:
        return self

    def synchronize(self) -> None: ...


class _OnCpu(TorchFunctionMode):
    """Rewrites the device of every call; asked for their type, tensors pass for those of a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        args = tuple(CPU if _is_cuda(arg) and not isinstance(arg, int) else arg for arg in args)
        return function(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)
