"""Stage 1 of the paper: best-fit-decreasing packing by memory (arXiv 2602.21788v2, section on packing).

It looks at memory only, never at time; that is the paper's choice, kept for the policy `paper`.
"""

from __future__ import annotations

from flexcp.cost.model import Load
from flexcp.planner.problem import Pack, Problem


def best_fit_decreasing(problem: Problem) -> tuple[Pack, ...]:
    """Pack samples, longest first, into bins of d_min·E tokens.

    A sample goes into the open bin with the least room left that still holds it; if none does, it opens a
    bin of its own least degree. K samples become K' <= K packs, each at the least degree that holds it.

    Complexity: O(K·K').
    """
    capacity_tokens = problem.cluster.tokens_per_rank
    members: list[list[int]] = []
    loads: list[Load] = []
    degrees: list[int] = []
    rooms: list[int] = []
    for position, load in enumerate(problem.loads):
        best = -1
        for index, room in enumerate(rooms):
            closer = load.tokens <= room and (best < 0 or room < rooms[best])
            if closer and problem.fits(loads[index] + load, degrees[index]):
                best = index
        if best < 0:
            best = len(rooms)
            degree = problem.min_degree(load)
            members.append([])
            loads.append(Load())
            degrees.append(degree)
            rooms.append(degree * capacity_tokens)
        members[best].append(position)
        loads[best] = loads[best] + load
        rooms[best] -= load.tokens
    return tuple(Pack(tuple(m), x, d) for m, x, d in zip(members, loads, degrees, strict=True))
