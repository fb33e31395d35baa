"""What all ranks do together: reducing gradients, gathering weights; how long it takes, and when it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import ModelShape
from flexcp.cost.memory import Sharding
from flexcp.cost.model import CostModel, Link

Array = npt.NDArray[np.float64]

_GRADIENT_BYTES = 4  # gradients add up over the tasks of a step in fp32
# Gradients or weights are sharded while tasks run, so every backward or forward is a collective of all ranks.
IN_WAVES: tuple[Sharding, ...] = ("zero2", "zero3")


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of the collectives of all ranks: in every wave, and at the end of a step."""

    wave_s: float
    step_s: float


def collectives(
    shape: ModelShape,
    cluster: Cluster,
    cost: CostModel,
    sharding: Sharding,
    *,
    element_bytes: int,
    uplinks: int | None = None,
) -> Collectives:
    """What a sharding of weights, gradients and optimizer exchanges.

    - `ddp`, `zero1`: once a step, see `reduction_s`. So the engine runs: `zero1` is its FSDP2, which gathers
      weights once a step.
    - `zero2`: gradients are reduced and scattered in every backward, weights gathered once a step.
    - `zero3`: weights are gathered in every forward and again in every backward (recomputation uses those of
      the backward), and gradients reduced and scattered in every backward.

    In waves this goes layer by layer, so latencies are waited for once a layer.

    Args:
        shape: what is sharded.
        cluster: over which ranks.
        cost: on which links.
        sharding: a name of `cost.memory.SHARDINGS`.
        element_bytes: of a gathered weight.
        uplinks: see `reduction_s`.
    """
    step_s = reduction_s(shape, cluster, cost, uplinks=uplinks)
    if sharding not in IN_WAVES:
        return Collectives(0.0, step_s)

    def one_way_s(weight_bytes: int, times: int = shape.layers) -> float:
        return _everywhere_s(weight_bytes * shape.parameters, times, cluster, cost, uplinks)

    if sharding == "zero2":
        return Collectives(one_way_s(_GRADIENT_BYTES), one_way_s(element_bytes, 1))
    return Collectives(2 * one_way_s(element_bytes) + one_way_s(_GRADIENT_BYTES), 0.0)


def reduction_s(shape: ModelShape, cluster: Cluster, cost: CostModel, *, uplinks: int | None = None) -> float:
    """Seconds to sum all gradients over all ranks, or to reduce-scatter them and gather weights as wide.

    Two levels, there and back: inside each node every rank takes 1/g of the bytes, g ranks a node; across M
    nodes every rank exchanges its part with its like, all ranks of a node at once. Each level moves
    (k - 1)/k of its bytes and waits ceil(log2 k) latencies. With fewer uplinks than ranks in a node, those
    share them.

    Raises:
        ConfigError: fewer than one uplink.

    >>> link = Link(1e9, 0.0)
    >>> cost = CostModel(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1, link, link)
    >>> shape = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> shape.parameters, round(1e9 * reduction_s(shape, Cluster(4, 1, 2), cost))  # 2 * (288/2 + 144/2)
    (72, 432)
    """
    return 2 * _everywhere_s(_GRADIENT_BYTES * shape.parameters, 1, cluster, cost, uplinks)


def _everywhere_s(
    total_bytes: float, times: int, cluster: Cluster, cost: CostModel, uplinks: int | None
) -> float:
    """One way of a reduction: so many bytes gathered or scattered over all ranks, in so many parts."""
    if uplinks is not None and uplinks < 1:
        raise ConfigError(f"uplinks is {uplinks}", "uplinks is at least 1; leave it out for no limit.")
    in_node = min(cluster.ranks, cluster.ranks_per_node)
    nodes = -(-cluster.ranks // in_node)
    rate = cost.inter.bytes_per_s * min(1.0, (uplinks or in_node) / in_node)
    inside_s = _level_s(total_bytes, times, in_node, cost.intra)
    return inside_s + _level_s(total_bytes / in_node, times, nodes, Link(rate, cost.inter.latency_s))


def _level_s(total_bytes: float, times: int, members: int, link: Link) -> float:
    waits_s = times * math.ceil(math.log2(members)) * link.latency_s
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
