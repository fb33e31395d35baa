"""Floating-point operations of one forward and backward pass, counted from the shape of a model.

Multiplications and additions count as one operation each. Norms, rotary and softmax are not counted: the
efficiencies in `hardware` absorb them.
"""

from __future__ import annotations

from flexcp.core.model_shape import ModelShape

# In units of one forward pass. Backward of a matrix product is two products; flash attention's backward
# is five products for the forward's two, because it computes the scores again.
MATMUL_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5


def flops_per_token(shape: ModelShape, *, checkpointing: bool = True) -> float:
    """FLOPs per token outside of attention: projections, feed-forward and output head.

    Forward costs 2 per weight, backward 4, and recomputing the layers under activation checkpointing 2
    more; the head is not recomputed by checkpointing. An embedding lookup costs nothing.

    >>> tiny = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> flops_per_token(tiny, checkpointing=False)     # 6 * (16 + 24 layer weights + 16 head weights)
    336.0
    >>> flops_per_token(tiny)                          # + 2 * 40
    416.0
    """
    layers = 2.0 * shape.layers * shape.layer_parameters
    head = 2.0 * shape.hidden * shape.vocab
    return layers * (1 + MATMUL_BACKWARD + checkpointing) + head * (1 + MATMUL_BACKWARD)


def flops_per_pair(shape: ModelShape, *, checkpointing: bool = True) -> float:
    """FLOPs per attended query-key pair, over all heads and layers.

    Forward costs 4 per pair and query channel: scores and weighted sum. Work is proportional to the true
    number of attended pairs, so the paper's mask factor (1 + η) is in the pairs, not here.

    >>> tiny = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> flops_per_pair(tiny, checkpointing=False), flops_per_pair(tiny)    # 8 * 3.5, 8 * 4.5
    (28.0, 36.0)
    """
    forward = 4.0 * shape.layers * shape.heads * shape.head_dim
    return forward * (1 + ATTENTION_BACKWARD + checkpointing)


def model_flops(shape: ModelShape, tokens: int, pairs: int) -> float:
    """FLOPs that one forward and backward pass needs, however it is computed.

    What is computed a second time (checkpointed layers, the scores in flash attention's backward) counts
    once, as in model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B); unlike there, attention counts
    the pairs really attended. The work of a vision encoder is left out.

    Args:
        shape: the model.
        tokens: of all samples.
        pairs: attended query-key pairs of all samples.

    >>> tiny = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> model_flops(tiny, tokens=2, pairs=3)     # 2 * 336 + 3 * 8 * 3
    744.0
    """
    forward = 4.0 * shape.layers * shape.heads * shape.head_dim
    return tokens * flops_per_token(shape, checkpointing=False) + pairs * forward * (1 + MATMUL_BACKWARD)
