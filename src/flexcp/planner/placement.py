"""Which ranks a pack runs on: degrees of one wave become disjoint rank groups.

Groups are data, not communicators; any ordered set of ranks is a ring. Only the links differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InfeasibleError

Group = tuple[int, ...]


def place(degrees: Sequence[int], cluster: Cluster) -> tuple[Group, ...]:
    """Disjoint groups for the packs of one wave, in the order of `degrees`.

    Groups wider than a node lie back to back from rank 0, so they cross few links and leave whole nodes.
    The others go, widest first, into the node with the least room that holds them. Where no node has room,
    a group gathers free ranks from node to node; it would cross nodes in any case. Groups are ascending,
    and contiguous except for those last ones.

    Raises:
        InfeasibleError: degrees sum to more than N.

    >>> place([3, 1, 10, 2], Cluster(ranks=16, tokens_per_rank=1, ranks_per_node=8))
    ((10, 11, 12), (15,), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (13, 14))
    """
    if sum(degrees) > cluster.ranks:
        raise InfeasibleError(
            f"a wave needs {sum(degrees)} ranks, there are {cluster.ranks}",
            "Spread the packs over more waves.",
        )
    groups: list[Group] = [()] * len(degrees)
    order = sorted(range(len(degrees)), key=lambda index: (-degrees[index], index))
    wide = [index for index in order if degrees[index] > cluster.ranks_per_node]
    cursor = 0
    for index in wide:
        groups[index] = tuple(range(cursor, cursor + degrees[index]))
        cursor += degrees[index]
    nodes = _free_by_node(cursor, cluster)
    homeless = []
    for index in order[len(wide) :]:
        degree = degrees[index]
        node = min((n for n in nodes if len(n) >= degree), key=len, default=None)
        if node is None:
            homeless.append(index)
        else:
            groups[index] = tuple(node[:degree])
            del node[:degree]
    left = [rank for node in nodes for rank in node]
    for index in homeless:
        groups[index] = tuple(left[: degrees[index]])
        del left[: degrees[index]]
    return tuple(groups)


def crosses_nodes(group: Group, cluster: Cluster) -> bool:
    """Whether the ring of a group uses a link between nodes."""
    return len({cluster.node_of(rank) for rank in group}) > 1


def _free_by_node(cursor: int, cluster: Cluster) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in range(cursor, cluster.ranks):
        nodes.setdefault(cluster.node_of(rank), []).append(rank)
    return list(nodes.values())


class FreeRanks:
    """The ranks of one wave that have no pack yet; groups are taken inside a node where they fit.

    Nodes are kept by the number of their free ranks, and every node gives its fastest ranks first.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.count = cluster.ranks
        self._nodes = _free_by_node(0, cluster)
        if cluster.speeds:
            for node in self._nodes:
                node.sort(key=lambda rank: -cluster.speeds[rank])
        self._by_free: list[list[int]] = [[] for _ in range(cluster.ranks_per_node + 1)]
        for number, node in reversed(list(enumerate(self._nodes))):
            self._by_free[len(node)].append(number)

    def take(self, degree: int, speed: float, crossing_speed: float) -> Group | None:
        """A group of `degree`, or None, which takes nothing.

        Inside the fullest node with room, or over nodes, the emptiest first.

        Args:
            degree: how many ranks.
            speed: speed that the slowest of them must have.
            crossing_speed: the same where the group crosses nodes.
        """
        if degree > self.count:
            return None
        for free in range(degree, len(self._by_free)):
            for at in range(len(self._by_free[free]) - 1, -1, -1):
                node = self._by_free[free][at]
                if self._cluster.speed(self._nodes[node][:degree]) >= speed:
                    del self._by_free[free][at]
                    return self._remove([(node, degree)])
        return self._across(degree, crossing_speed)

    def _across(self, degree: int, speed: float) -> Group | None:
        parts, missing = list[tuple[int, int]](), degree
        for free in range(len(self._by_free) - 1, 0, -1):
            for node in reversed(self._by_free[free]):
                if missing and self._cluster.speed(self._nodes[node][: min(free, missing)]) >= speed:
                    parts.append((node, min(free, missing)))
                    missing -= parts[-1][1]
        if missing:
            return None
        for node, _ in parts:
            self._by_free[len(self._nodes[node])].remove(node)
        return self._remove(parts)

    def _remove(self, parts: list[tuple[int, int]]) -> Group:
        taken = []
        for number, count in parts:
            node = self._nodes[number]
            taken += node[:count]
            del node[:count]
            self._by_free[len(node)].append(number)
        self.count -= len(taken)
        return tuple(sorted(taken))
