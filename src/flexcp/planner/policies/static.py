"""Policy `static`: the fair baseline, one degree for all, no padding, packs balanced by time.

What a well-run static configuration reaches. It is not the padded baseline of the published comparison.
"""

from __future__ import annotations

from flexcp.planner.balance import Slot, fill, room_tokens, shelves
from flexcp.planner.problem import Assignment, Problem
from flexcp.planner.timeline import assignment_s

_EXTRA_WAVES = 3


def assign(problem: Problem) -> Assignment:
    """Try every degree that divides N and holds the longest sample; the best wins.

    For each, N / d groups times some number of waves are filled longest first, within memory, and packs of
    like duration share a wave.

    Complexity: O(divisors · waves · K log K).
    """
    longest = problem.cluster.min_degree(problem.loads[0].tokens)
    best: Assignment = ()
    best_s = float("inf")
    for degree in range(longest, problem.ranks + 1):
        if problem.ranks % degree:
            continue
        for assignment in with_degree(problem, degree):
            total_s = assignment_s(problem, assignment)
            if total_s < best_s:
                best, best_s = assignment, total_s
    return best


def with_degree(problem: Problem, degree: int) -> list[Assignment]:
    """Plans at one degree that divides N, for the few least wave counts that memory allows."""
    groups = problem.ranks // degree
    # A lone sample always fits its slot, even where the room for mixtures is less.
    room = max(room_tokens(problem, degree), problem.loads[0].tokens)
    waves = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    found: list[Assignment] = []
    while len(found) <= _EXTRA_WAVES and (waves - 1) * groups < len(problem.loads):
        slots = [Slot(0.0, room, degree) for _ in range(groups * waves)]
        if fill(slots, range(len(problem.loads)), problem):
            packs = [problem.pack(slot.samples, degree) for slot in slots if slot.samples]
            if all(problem.fits(pack.load, degree) for pack in packs):
                found.append(shelves(packs, problem))
        waves += 1
    return found
