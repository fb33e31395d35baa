"""What running tasks take from each other: links out of a node, and cores of a node.

Flow level: a ring that crosses nodes is a flow out of every node that it leaves, for as long as its task
runs. Flows out of one node share its links equally, each at most a whole link, and a ring goes at the pace
of its slowest hop. So a ring that messages need only now and then counts like one that never stops (times
come out on the long side), and what a flow leaves unused elsewhere is not handed on. A gather or an
all-to-all is a flow from every member. Only the messages slow down, and only what attention does not hide
shows: at a given share a task takes what the cost model says for a link of that bandwidth. When shares
change, the part of a task that is left goes on at the new rate.

Cores: ranks that compute on a node get equal parts of its cores, at most one each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from flexcp.core.plan import Plan, Task
from flexcp.cost.model import CostModel, Link

# node, ranks of the task on it, flows that leave it
Footprint = tuple[tuple[int, int, int], ...]


class Sharing:
    """Shares of all running tasks of one step.

    Args:
        plan: the step.
        seconds: of each task, alone on its links and cores.
        seconds_at: seconds of a task when its messages have a given share of a link.
        uplinks, cores: see `simulate.conditions.Conditions`.
    """

    def __init__(
        self,
        plan: Plan,
        seconds: list[float],
        seconds_at: Callable[[int, float], float],
        *,
        uplinks: int | None,
        cores: int | None,
    ) -> None:
        self._seconds, self._seconds_at = seconds, seconds_at
        self._uplinks, self._cores = uplinks, cores
        self._footprints = [_footprint(plan, task) for task in plan.tasks]
        self._busy: Counter[int] = Counter()
        self._flows: Counter[int] = Counter()
        self._on: dict[int, dict[int, None]] = {}  # node to the running tasks that share something there

    def enter(self, index: int) -> tuple[int, ...]:
        """A task starts; returns the tasks whose seconds may have changed, itself among them."""
        for node, ranks, flows in self._footprints[index]:
            self._busy[node] += ranks
            self._flows[node] += flows
            if self._cores or flows:
                self._on.setdefault(node, {})[index] = None
        return self._neighbours(index)

    def leave(self, index: int) -> tuple[int, ...]:
        """A task ends; returns the tasks whose seconds may have changed."""
        for node, ranks, flows in self._footprints[index]:
            self._busy[node] -= ranks
            self._flows[node] -= flows
            if self._cores or flows:
                del self._on[node][index]
        return self._neighbours(index)

    def _neighbours(self, index: int) -> tuple[int, ...]:
        if not self._cores and not any(flows for _, _, flows in self._footprints[index]):
            return ()
        nodes = [node for node, _, _ in self._footprints[index]]
        return tuple(dict.fromkeys(other for node in nodes for other in self._on.get(node, ())))

    def seconds(self, index: int) -> float:
        """How long a running task would take as a whole at the shares of this moment."""
        seconds, footprint = self._seconds[index], self._footprints[index]
        if self._uplinks:
            share = min((self._uplinks / self._flows[n] for n, _, flows in footprint if flows), default=1.0)
            if share < 1:
                seconds = self._seconds_at(index, share)
        if self._cores:
            seconds /= min(1.0, *(self._cores / self._busy[node] for node, _, _ in footprint))
        return seconds


def _footprint(plan: Plan, task: Task) -> Footprint:
    """Ranks and flows of a task by node; flows only where some sample is cut and the group crosses nodes.

    >>> from flexcp.core.cluster import Cluster
    >>> from flexcp.core.sample import Sample
    >>> task = Task((0,), (2, 3, 4, 5, 6), 0, 0.0, 1.0)
    >>> plan = Plan("static", "lockstep", Cluster(8, 4, 4), 2, (Sample(0, 20),), (task,), 1.0)
    >>> _footprint(plan, task), _footprint(plan, replace(task, exchange="all-to-all"))
    (((0, 2, 1), (1, 3, 1)), ((0, 2, 2), (1, 3, 3)))
    """
    nodes = [plan.cluster.node_of(rank) for rank in task.ranks]
    ranks = Counter(nodes)
    if len(ranks) == 1:
        return ((nodes[0], len(nodes), 0),)
    travels = any(sample.tokens >= plan.whole_below_tokens for sample in plan.pack(task))
    if task.exchange != "ring":
        return tuple((node, count, count * travels) for node, count in ranks.items())
    following = [*nodes[1:], nodes[0]]
    leaves = Counter(a for a, b in zip(nodes, following, strict=True) if a != b and travels)
    return tuple((node, count, leaves[node]) for node, count in ranks.items())


@lru_cache(maxsize=256)
def at_link_share(cost: CostModel, share: float) -> CostModel:
    """The same with a share of the bandwidth of each link across nodes."""
    return replace(cost, inter=Link(cost.inter.bytes_per_s * share, cost.inter.latency_s))
