"""Policy `megatron-dynamic`: powers of two by tokens, balanced by L²/d, as Megatron-Core plans dynamic CP.

The original, BalancedCPScheduler, gives a sample the next power of two of tokens / E
ranks, whatever it costs. It fills a wave longest first: a sample joins the least loaded group of its degree,
or opens one on the next free ranks. A wave ends when nothing fits, or, once degrees have begun to fall, when
all ranks are loaded alike to 5 %; then ranks without work are used up by doubling the narrowest group.

Ours makes the same groups and waves (tests compare, where megatron-core is installed) and differs in:

- samples of a group are packed up to its memory; the original runs them one by one;
- free-running plans have no barrier between waves; the original has one;
- N may be any number: doubling stops where the ranks do not suffice. The original fails or asks for groups
  that it has not made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flexcp.core.errors import InfeasibleError
from flexcp.cost.model import Load
from flexcp.planner.problem import Assignment, Pack, Problem

_BALANCED = 0.05  # ranks are loaded alike when the least has at least 95 % of the most
_TIER_SLACK = 1.1


@dataclass(slots=True)
class _Group:
    degree: int
    first: int
    load: float = 0.0
    samples: list[int] = field(default_factory=list)


def assign(problem: Problem) -> Assignment:
    """Waves until no sample is left.

    Complexity: O(K · groups of a wave).

    Raises:
        InfeasibleError: the power of two that the longest sample needs exceeds N.
    """
    degrees = [_power_of_two(problem.min_degree(load)) for load in problem.loads]
    if degrees[0] > problem.ranks:
        raise InfeasibleError(
            f"needs degree {degrees[0]}, the next power of two of {problem.min_degree(problem.loads[0])}; "
            f"there are {problem.ranks} ranks",
            "Raise the tokens per rank.",
        )
    works = [load.tokens**2 / degree for load, degree in zip(problem.loads, degrees, strict=True)]
    left = list(range(len(degrees)))
    waves: list[tuple[Pack, ...]] = []
    while left:
        groups, left = _next_wave(left, degrees, works, problem.ranks)
        queues = [_packs(problem, group) for group in groups]
        rounds = max(map(len, queues))
        waves += [tuple(queue[turn] for queue in queues if turn < len(queue)) for turn in range(rounds)]
    return tuple(waves)


def _power_of_two(degree: int) -> int:
    return 1 << (degree - 1).bit_length()


def _next_wave(
    samples: list[int], degrees: list[int], works: list[float], ranks: int
) -> tuple[list[_Group], list[int]]:
    """Groups of one wave, back to back from rank 0 in falling degree; the samples that are left."""
    tiers = _tiers(samples, degrees, works)
    groups: list[_Group] = []
    used, widest = 0, degrees[tiers[0][0]]
    falling = False
    while tiers:
        choice = next((tier for tier in tiers if _can_place(degrees[tier[0]], groups, ranks - used)), None)
        if choice is None:
            break
        sample = choice.popleft()
        degree = degrees[sample]
        if ranks - used >= degree:  # a fresh group is always the least loaded
            group = _Group(degree, used)
            groups.append(group)
            used += degree
        else:
            group = min((g for g in groups if g.degree == degree), key=lambda g: g.load)
        group.samples.append(sample)
        group.load += works[sample]
        tiers = [tier for tier in tiers if tier]
        falling = falling or degree < widest
        if falling and tiers and used == ranks and _balanced(groups):
            break
    left = [sample for tier in tiers for sample in tier]
    if used == ranks:
        left += _trim(groups, works)
    else:
        _widen(groups, ranks - used)
    return groups, left


def _tiers(samples: list[int], degrees: list[int], works: list[float]) -> list[deque[int]]:
    """As many runs of samples as there are degrees, of about equal work."""
    count = len({degrees[sample] for sample in samples})
    target = _TIER_SLACK * sum(works[sample] for sample in samples) / count
    tiers: list[deque[int]] = []
    tier: deque[int] = deque()
    work = 0.0
    for index, sample in enumerate(samples):
        scarce = len(samples) - index <= count - 2 * len(tiers)  # the rest must do for the other tiers
        if tier and (work + works[sample] > target or scarce):
            tiers.append(tier)
            tier, work = deque(), 0.0
        tier.append(sample)
        work += works[sample]
    return [*tiers, tier]


def _can_place(degree: int, groups: list[_Group], free: int) -> bool:
    return free >= degree or any(group.degree == degree for group in groups)


def _balanced(groups: list[_Group]) -> bool:
    most, least = max(group.load for group in groups), min(group.load for group in groups)
    return most - least <= _BALANCED * most


def _trim(groups: list[_Group], works: list[float]) -> list[int]:
    """Take the last samples back from the most loaded group as long as that evens the loads."""
    taken: list[int] = []
    while not _balanced(groups):
        group = max(groups, key=lambda g: g.load)
        spread = group.load - min(g.load for g in groups)
        if len(group.samples) <= 1:
            break
        loads = [g.load - works[g.samples[-1]] if g is group else g.load for g in groups]
        if max(loads) - min(loads) >= spread:
            break
        group.load -= works[group.samples[-1]]
        taken.append(group.samples.pop())
    return taken


def _widen(groups: list[_Group], free: int) -> None:
    """Double the first of the narrowest groups until no rank is left; later groups move up."""
    while free:
        group = min(groups, key=lambda g: g.degree)
        if group.degree > free:
            return
        free -= group.degree
        group.degree *= 2
        first = 0
        for other in groups:
            other.first = first
            first += other.degree


def _packs(problem: Problem, group: _Group) -> list[Pack]:
    """The samples of a group in their order, together as far as memory allows."""
    packs: list[list[int]] = []
    load = Load()
    for sample in group.samples:
        grown = load + problem.loads[sample]
        if packs and problem.fits(grown, group.degree):
            packs[-1].append(sample)
            load = grown
        else:
            packs.append([sample])
            load = problem.loads[sample]
    ranks = tuple(range(group.first, group.first + group.degree))
    made = [problem.pack(samples, group.degree) for samples in packs]
    return [Pack(pack.samples, pack.load, pack.degree, ranks) for pack in made]
