"""The TP x PP grid under the ranks of a plan: one rank is one cell, N = DP cells.

Read from Megatron's `parallel_state`, whatever the order of its dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError
from flexcp.runtime.collectives import all_gather_rows, collective_device


@dataclass(frozen=True)
class Grid:
    """Where this process stands.

    Attributes:
        cells: N, the data-parallel size.
        tensor: TP size.
        pipeline: PP size.
        expert: EP size.
        columns: processes by cell, one list for each place in a cell; the same on all processes.
        is_first: whether this is the first process of its cell, which speaks for it.
        has_loss: whether this is the one process of its cell whose loss is counted.
    """

    cells: int
    tensor: int
    pipeline: int
    expert: int
    columns: tuple[tuple[int, ...], ...]
    is_first: bool
    has_loss: bool

    @property
    def passes_waves_together(self) -> bool:
        """Whether every rank must run as many micro-batches as every other."""
        return self.pipeline > 1 or self.expert > 1


def read_grid() -> Grid:
    """The grid of this process; a collective of all processes.

    Raises:
        ConfigError: Megatron's groups are not there yet.
    """
    column = _column()
    mine = torch.tensor(column, dtype=torch.int64, device=collective_device())
    rows = all_gather_rows(mine, "reading the grid of the processes")
    first_of_tensor = parallel_state.get_tensor_model_parallel_rank() == 0
    return Grid(
        cells=len(column),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        columns=tuple(sorted({tuple(row) for row in rows.tolist()})),
        is_first=first_of_tensor and parallel_state.get_pipeline_model_parallel_rank() == 0,
        has_loss=first_of_tensor and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
    )


def cluster(tokens_per_rank: int, *, gpus_per_node: int = 8) -> Cluster:
    """What to plan for: Megatron's data-parallel ranks, and how many of them share a node.

    Args:
        tokens_per_rank: that one cell may hold at a time.
        gpus_per_node: processes that share the fast links, numbered one after the other.

    Raises:
        ConfigError: Megatron's groups are not there yet.
    """
    column = _column()
    node = dist.get_rank() // gpus_per_node
    same_node = sum(process // gpus_per_node == node for process in column)
    mine = torch.tensor([same_node], dtype=torch.int64, device=collective_device())
    per_node = int(all_gather_rows(mine, "counting the ranks of a node").max())
    return Cluster(ranks=len(column), tokens_per_rank=tokens_per_rank, ranks_per_node=per_node)


def _column() -> list[int]:
    """Processes that have the place of this one in their cells, by cell."""
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "Megatron's process groups are not initialized",
            "Call parallel_state.initialize_model_parallel(…) first.",
        )
    return dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
