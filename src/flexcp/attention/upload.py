"""Small tables of the plan on the device: copied from pinned memory, so that the host need not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(table: Tensor, device: torch.device) -> Tensor:
    """`table`, made on the CPU, on `device`. A copy from ordinary memory would wait for all queued work."""
    if device.type in ("cpu", "meta"):
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
