"""Bytes one rank needs: model states by sharding, activations by token, the loss by chunk.

The answer of this module is E as tokens, `tokens_per_rank`; M(s) = E-bytes per token x tokens and
d_min = ceil(tokens / E) follow from it (`core.cluster.Cluster.min_degree`).
"""

from __future__ import annotations

from typing import Literal

from flexcp.core.errors import InfeasibleError, UnknownNameError
from flexcp.core.model_shape import ModelShape
from flexcp.cost.presets import Hardware

Sharding = Literal["ddp", "zero1", "zero3"]
SHARDINGS: tuple[Sharding, ...] = ("ddp", "zero1", "zero3")

# The loss widens logits to fp32 in chunks of so many tokens (`runtime.loss`).
LOSS_CHUNK_TOKENS = 1024
_FLOAT_BYTES = 4


def model_state_bytes(shape: ModelShape, sharding: Sharding, ranks: int, element_bytes: int) -> float:
    """Bytes of weights, gradients and optimizer on one rank, at their peak within a step.

    Adam keeps two fp32 moments, and an fp32 master copy when weights are narrower. Gradients add up over
    the tasks of a step in fp32.

    - `ddp`: everything on every rank.
    - `zero1`: what FSDP2 is when it gathers once per step: full weights and gradients, optimizer / ranks.
    - `zero3`: everything / ranks, plus two layers gathered (one computing, one prefetched).

    >>> tiny = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> tiny.parameters, [model_state_bytes(tiny, s, 4, 2) for s in SHARDINGS]    # 72 * 18, 72 * 9, ...
    (72, [1296.0, 648.0, 768.0])

    Raises:
        UnknownNameError: no such sharding.
    """
    master = _FLOAT_BYTES if element_bytes < _FLOAT_BYTES else 0
    optimizer = 2 * _FLOAT_BYTES + master
    resident = element_bytes + _FLOAT_BYTES
    if sharding == "ddp":
        return float(shape.parameters * (resident + optimizer))
    if sharding == "zero1":
        return shape.parameters * (resident + optimizer / ranks)
    if sharding == "zero3":
        gathered = 2 * shape.layer_parameters * (element_bytes + _FLOAT_BYTES)
        # The stored shard of the weights is the master copy where there is one.
        stored = _FLOAT_BYTES + optimizer + (0 if master else element_bytes)
        return shape.parameters * stored / ranks + gathered
    raise UnknownNameError("sharding", sharding, SHARDINGS)


def activation_bytes_per_token(shape: ModelShape, element_bytes: int, *, checkpointing: bool = True) -> float:
    """Bytes that one token of a pack keeps until its backward pass.

    With checkpointing every layer keeps its input, and one layer at a time keeps everything; without it,
    all layers do. Flash attention keeps no scores. The ring holds two shards of K and V in flight and the
    fp32 gradients of one.
    """
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Inputs of both norms and of both blocks; q, k, v and the output; gate, up, product.
    layer = element_bytes * (4 * shape.hidden + 2 * query + 2 * key_value + 3 * shape.intermediate)
    ring = 2 * key_value * (2 * element_bytes + 2 * _FLOAT_BYTES)
    if not checkpointing:
        return float(shape.layers * layer + ring)
    inputs = shape.layers * shape.hidden * element_bytes
    return float(inputs + 2 * layer + ring)  # twice: the layer's activations and their gradients


def logits_bytes_per_token(shape: ModelShape, element_bytes: int) -> float:
    """Bytes per token of the logits and of their gradient, both in the training precision."""
    return float(2 * shape.vocab * element_bytes)


def tokens_per_rank(
    shape: ModelShape,
    hardware: Hardware,
    ranks: int,
    *,
    sharding: Sharding = "zero1",
    checkpointing: bool = True,
    reserve: float = 0.1,
) -> int:
    """E as tokens: how many one rank may hold at a time.

    Args:
        shape: the model; one rank holds all of it, apart from what is sharded.
        hardware: what one rank is.
        ranks: N, over which states are sharded.
        sharding: see `model_state_bytes`.
        checkpointing: see `activation_bytes_per_token`.
        reserve: share of the device memory left to the allocator, the runtime and communication.

    Raises:
        InfeasibleError: model states and one loss chunk leave nothing; the numbers are named.
    """
    budget = hardware.memory_bytes * (1 - reserve)
    states = model_state_bytes(shape, sharding, ranks, hardware.element_bytes)
    loss = 3 * LOSS_CHUNK_TOKENS * shape.vocab * _FLOAT_BYTES  # a chunk widened, its softmax, its slope
    per_token = activation_bytes_per_token(shape, hardware.element_bytes, checkpointing=checkpointing)
    per_token += logits_bytes_per_token(shape, hardware.element_bytes)
    tokens = int((budget - states - loss) // per_token)
    if tokens < 1:
        raise InfeasibleError(
            f"{shape.name} leaves no memory for tokens on {hardware.name}: {budget / 1e9:.1f} GB usable, "
            f"{states / 1e9:.1f} GB model states ({sharding}, {ranks} ranks), {loss / 1e9:.1f} GB loss chunk",
            "Shard more (zero1), use more ranks, tensor or pipeline parallelism, or larger devices.",
        )
    return tokens
