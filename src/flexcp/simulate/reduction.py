"""The gradient reduction at the end of a step: how long it takes, and when it ends."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from flexcp.core.cluster import Cluster
from flexcp.core.model_shape import ModelShape
from flexcp.cost.model import CostModel, Link

Array = npt.NDArray[np.float64]

_GRADIENT_BYTES = 4  # gradients add up over the tasks of a step in fp32


def reduction_s(shape: ModelShape, cluster: Cluster, cost: CostModel, *, uplinks: int | None = None) -> float:
    """Seconds to sum all gradients over all ranks, or to reduce-scatter them and gather weights as wide.

    Two levels, there and back: inside each node every rank takes 1/g of the bytes, g ranks a node; across M
    nodes every rank exchanges its part with its like, all ranks of a node at once. Each level moves
    (k - 1)/k of its bytes and waits ceil(log2 k) latencies. With fewer uplinks than ranks in a node, those
    share them.

    >>> link = Link(1e9, 0.0)
    >>> cost = CostModel(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1, link, link)
    >>> shape = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> shape.parameters, round(1e9 * reduction_s(shape, Cluster(4, 1, 2), cost))  # 2 * (288/2 + 144/2)
    (72, 432)
    """
    in_node = min(cluster.ranks, cluster.ranks_per_node)
    nodes = -(-cluster.ranks // in_node)
    total_bytes = float(_GRADIENT_BYTES * shape.parameters)
    rate = cost.inter.bytes_per_s * min(1.0, (uplinks or in_node) / in_node)
    inside_s = _one_way_s(total_bytes, in_node, cost.intra)
    across_s = _one_way_s(total_bytes / in_node, nodes, Link(rate, cost.inter.latency_s))
    return 2 * (inside_s + across_s)


def _one_way_s(total_bytes: float, members: int, link: Link) -> float:
    waits_s = math.ceil(math.log2(members)) * link.latency_s
    return total_bytes * (members - 1) / members / link.bytes_per_s + waits_s


def reduction_end_s(
    last_end_s: Array, last_backward_s: Array, reduce_s: float, layers: int, *, overlap: bool
) -> float:
    """When the reduction ends, in the clock of the arguments.

    Without overlap it begins when every rank has ended its last task. With it, layers are reduced one after
    the other, each when the last backward of every rank has passed it, layers taking equal parts of a
    backward. Ring messages that still run then are not slowed by it.

    Args:
        last_end_s: end of the last task of each rank; the opening of the step where it has none.
        last_backward_s: duration of the backward of that task; 0 where there is none.
        reduce_s: of all layers together.
        layers: of the model.
        overlap: see above.

    >>> ends, backwards = np.array([10.0, 9.0]), np.array([4.0, 1.0])
    >>> [reduction_end_s(ends, backwards, 2.0, 4, overlap=overlap) for overlap in (False, True)]
    [12.0, 10.5]
    """
    if not overlap:
        return float(last_end_s.max()) + reduce_s
    done_s = 0.0
    for layer in range(1, layers + 1):
        passed_s = float((last_end_s - last_backward_s * (1 - layer / layers)).max())
        done_s = max(done_s, passed_s) + reduce_s / layers
    return done_s
