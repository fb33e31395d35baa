"""Policy `paper`: the published algorithm (arXiv 2602.21788v2): pack by memory, then choose degrees.

Where the published code departs from its text, this follows the text: times come from the cost model
(there: fixed constants), memory is enforced (there: the check always passes), packs that need more than N
ranks at a time become several waves (there: an exception), and spare ranks go where they lower the makespan
or stay idle (there: dealt out in turn).
"""

from __future__ import annotations

from flexcp.planner.allocation import dynamic_programme, threshold
from flexcp.planner.packing import best_fit_decreasing
from flexcp.planner.problem import Assignment, Pack, Problem
from flexcp.planner.timeline import assignment_s

# Wave counts tried beyond the least that works; more waves give wider groups and more waiting.
_EXTRA_WAVES = 3
# Beyond this the dynamic programme takes seconds; the threshold search has the same makespan.
_MOST_PROGRAMMED_RANKS = 256


def assign(problem: Problem) -> Assignment:
    """Best-fit decreasing over the global batch, then degrees wave by wave; the best wave count wins.

    Complexity: O(K·K' + waves · K'·N²); above 256 ranks O(K·K' + waves · K'·N·log(K'·N)).
    """
    packs = best_fit_decreasing(problem)
    seconds = [problem.seconds(pack) for pack in packs]
    order = sorted(range(len(packs)), key=lambda index: (-seconds[index], -packs[index].degree, index))
    count = -(-sum(pack.degree for pack in packs) // problem.ranks)
    best: Assignment = ()
    best_s, tried = float("inf"), 0
    while tried <= _EXTRA_WAVES and count <= len(packs):
        waves = _deal([packs[index] for index in order], count, problem)
        if waves is not None:
            tried += 1
            assignment = tuple(_allocate(wave, problem) for wave in waves if wave)
            total_s = assignment_s(problem, assignment)
            if total_s < best_s:
                best, best_s = assignment, total_s
        count += 1
    return best


def _deal(packs: list[Pack], count: int, problem: Problem) -> list[list[Pack]] | None:
    """Packs, longest first, each to the wave with least rank-seconds that has the ranks; None if stuck."""
    waves: list[list[Pack]] = [[] for _ in range(count)]
    free, area_s = [problem.ranks] * count, [0.0] * count
    for pack in packs:
        open_waves = [w for w in range(count) if free[w] >= pack.degree]
        if not open_waves:
            return None
        wave = min(open_waves, key=lambda w: (area_s[w], w))
        waves[wave].append(pack)
        free[wave] -= pack.degree
        area_s[wave] += pack.degree * problem.seconds(pack)
    return waves


def _allocate(wave: list[Pack], problem: Problem) -> tuple[Pack, ...]:
    solve = dynamic_programme if problem.ranks <= _MOST_PROGRAMMED_RANKS else threshold
    degrees = solve(problem.table_s([pack.load for pack in wave]))
    return tuple(Pack(p.samples, p.load, d) for p, d in zip(wave, degrees, strict=True))
