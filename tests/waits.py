"""Where a host would wait for its accelerator: on CPU by the operators that are run, on CUDA by torch."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
# Their answer is on the host, or a size that only the data know.
_ASKING = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.masked_select.default,
    _ATEN.nonzero.default,
    _ATEN._unique2.default,
    _ATEN.unique_consecutive.default,
    _ATEN.unique_dim.default,
    _ATEN.repeat_interleave.Tensor,
}
# With a mask for an index they ask how many entries it has.
_INDEXING = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default}


class Asked(TorchDispatchMode):
    """Notes who runs an operator that an accelerator would have to be waited for.

    Args:
        host_only: functions that look at tensors of the host alone, and at none on an accelerator.

    Attributes:
        by: operator and place in the code, in order.
    """

    def __init__(self, host_only: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.by: list[str] = []
        self._host_only = set(host_only)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        masks = func in _INDEXING and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if func in _ASKING or masks:
            stack = traceback.extract_stack()[:-1]
            if not self._host_only & {frame.name for frame in stack}:
                place = next(f for f in reversed(stack) if "/torch/" not in f.filename)
                self.by.append(f"{func} in {place.name} ({place.filename.rsplit('/', 1)[-1]})")
        return func(*args, **(kwargs or {}))


# `hooks._require_positions` compares what lies on the host, and returns at once where it does not.
_HOST_ONLY = ("_require_positions",)


def first_wait(work: Callable[[], Any], device: torch.device) -> str:
    """Where `work` first makes the host wait; empty if nowhere."""
    if device.type == "cuda":
        with _refused():
            try:
                work()
            except RuntimeError as error:
                return str(error).splitlines()[0]
        return ""
    with Asked(_HOST_ONLY) as asked:
        work()
    return asked.by[0] if asked.by else ""


@contextmanager
def _refused() -> Iterator[None]:
    """torch raises where it would wait; it warns of that being a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
