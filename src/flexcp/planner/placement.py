"""Which ranks a pack runs on: degrees of one wave become disjoint rank groups.

Groups are data, not communicators; any ordered set of ranks is a ring. Only the links differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InfeasibleError

Group = tuple[int, ...]


def place(degrees: Sequence[int], cluster: Cluster) -> tuple[Group, ...]:
    """Disjoint groups for the packs of one wave, in the order of `degrees`; the widest choose first.

    Groups are ascending, and contiguous unless they gather the last free ranks of several nodes.

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
    free = FreeRanks(cluster)
    groups: list[Group] = [()] * len(degrees)
    for index in sorted(range(len(degrees)), key=lambda index: (-degrees[index], index)):
        groups[index] = free.take(degrees[index]) or ()
    return tuple(groups)


def crosses_nodes(group: Group, cluster: Cluster) -> bool:
    """Whether the ring of a group uses a link between nodes."""
    return len({cluster.node_of(rank) for rank in group}) > 1


class FreeRanks:
    """The ranks of one wave that have no pack yet; groups are taken inside a node where they fit.

    Attributes:
        count: how many they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.count = cluster.ranks
        per_node = min(cluster.ranks_per_node, cluster.ranks)
        starts = range(0, cluster.ranks, per_node)
        self._nodes = [list(range(start, min(start + per_node, cluster.ranks))) for start in starts]
        if cluster.speeds:
            for node in self._nodes:
                node.sort(key=lambda rank: -cluster.speeds[rank])
        # Nodes by the number of their free ranks; the last of a list is taken first.
        self._by_free: list[list[int]] = [[] for _ in range(per_node + 1)]
        for number in reversed(range(len(self._nodes))):
            self._by_free[len(self._nodes[number])].append(number)

    def take(self, degree: int, speed: float = 0.0, crossing_speed: float = 0.0) -> Group | None:
        """A group of `degree`, or None, which takes nothing.

        It comes from the node with least room that holds it, else from several: whole nodes, then the node
        with least room for the rest, so that few links cross. A node gives its fastest ranks.

        Args:
            degree: how many ranks.
            speed: that the slowest of them must have.
            crossing_speed: the same where the group crosses nodes.
        """
        if degree > self.count:
            return None
        inside = degree < len(self._by_free) and self._fitting(degree, speed, whole=True)
        if inside:
            return self._taken([self._detach(*inside)])
        parts, missing = list[tuple[int, int]](), degree
        while missing:
            found = self._fitting(missing, crossing_speed)
            if found is None:
                for node, _ in parts:
                    self._attach(node)
                return None
            parts.append(self._detach(*found))
            missing -= parts[-1][1]
        return self._taken(parts)

    def _fitting(self, count: int, speed: float, whole: bool = False) -> tuple[int, int, int] | None:
        """The node with least room for `count` ranks, else (not `whole`) with most room for some of them.

        Returns the number of its free ranks, its place among such nodes, and how many ranks it gives.
        """
        most = len(self._by_free) - 1
        rooms = [*range(count, most + 1), *(() if whole else range(min(count - 1, most), 0, -1))]
        for free in rooms:
            nodes, given = self._by_free[free], min(free, count)
            for at in range(len(nodes) - 1, -1, -1):
                if self._cluster.speed(self._nodes[nodes[at]][:given]) >= speed:
                    return free, at, given
        return None

    def _detach(self, free: int, at: int, given: int) -> tuple[int, int]:
        return self._by_free[free].pop(at), given

    def _attach(self, node: int) -> None:
        self._by_free[len(self._nodes[node])].append(node)

    def _taken(self, parts: Sequence[tuple[int, int]]) -> Group:
        """Ranks of detached nodes, as many as each gives; the nodes go back with the rest of theirs."""
        taken = []
        for number, count in parts:
            node = self._nodes[number]
            taken += node[:count]
            del node[:count]
            self._attach(number)
        self.count -= len(taken)
        return tuple(sorted(taken))
