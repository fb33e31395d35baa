"""Megatron-Core: GPT models whose attention is a module of the layer spec, under a fixed TP x PP grid.

Nothing is patched. `with_attention(spec)` puts FlexCP's attention into a layer spec, `enable(model)` lets a
built model rotate by local positions, and `Engine` hands out what `get_forward_backward_func()` is called
with. Megatron's own context-parallel size stays 1: groups are made out of its data-parallel ranks.
"""

from flexcp.integrations.megatron.attention import FlexCPAttention, with_attention
from flexcp.integrations.megatron.batches import SeqParams
from flexcp.integrations.megatron.config import shape_of
from flexcp.integrations.megatron.data import IndexedDocuments
from flexcp.integrations.megatron.engine import Engine
from flexcp.integrations.megatron.grid import cluster
from flexcp.integrations.megatron.hooks import enable
from flexcp.integrations.megatron.step import Step

__all__ = [
    "Engine",
    "FlexCPAttention",
    "IndexedDocuments",
    "SeqParams",
    "Step",
    "cluster",
    "enable",
    "shape_of",
    "with_attention",
]
