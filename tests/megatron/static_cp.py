"""Megatron's static context parallelism without Transformer Engine: all its own but the attention kernel.

Its zigzag slices, its rotary positions, its reduction over data and context parallel ranks; only the kernel,
which Megatron takes from Transformer Engine, is dense attention over gathered keys and values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor, nn

from tests.megatron import host


class GatheredAttention(nn.Module):
    """Attention of this rank's zigzag rows to all rows of the sample."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        keys, values = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        rows = [_rows(query.shape[0], rank, group.size()) for rank in range(group.size())]
        hidden = rows[group.rank()][:, None] < torch.cat(rows)
        heads = query.shape[2] // key.shape[2]
        keys, values = (x.repeat_interleave(heads, 2) for x in (keys, values))
        scores = torch.einsum("ibhd,jbhd->bhij", query, keys) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhij,jbhd->ibhd", weights, values).flatten(2)


def _rows(count: int, rank: int, size: int) -> Tensor:
    """Positions of a rank's rows: one slice from the front, its mirror image from the back."""
    half = count // 2
    front = torch.arange(rank * half, (rank + 1) * half)
    return torch.cat([front, torch.arange(half) + (2 * size - 1 - rank) * half])


def provider(config: Any) -> Any:
    """Megatron's model with that kernel."""
    spec = host.local_spec(config)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
    return host.provider(config, flexible=False, spec=spec)


class ContextStep(host.StaticStep):
    """Each context-parallel group runs whole samples in turn, one a micro-batch, cut over its ranks."""

    def __init__(self, dataset: Any, batch: Sequence[int]) -> None:
        super().__init__(dataset, batch)
        self.schedule["data_iterator"] = (_slice(sample) for sample in self.schedule["data_iterator"])


def _slice(sample: dict[str, Any]) -> dict[str, Any]:
    """Padded to a multiple of twice the ranks, as Megatron asks for, and cut by Megatron."""
    multiple = 2 * parallel_state.get_context_parallel_world_size()
    fill = -sample["tokens"].shape[1] % multiple
    rows = {
        name: nn.functional.pad(sample[name], (0, fill))
        for name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    # Newer releases also cut for their own dynamic layout, and ask which it is and for whom.
    options: dict[str, Any] = {"cp_group": parallel_state.get_context_parallel_group(), "is_hybrid_cp": False}
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    cut = get_batch_on_this_cp_rank(rows, **{name: value for name, value in options.items() if name in known})
    return {**cut, "attention_mask": None, "packed_seq_params": None}
