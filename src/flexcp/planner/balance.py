"""Filling slots evenly: longest processing time first, within memory.

A slot is a place for one pack: it has seconds already in it, room in tokens, and a width in ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexcp.planner.problem import Pack, Problem, Wave


@dataclass(slots=True)
class Slot:
    """A pack in the making.

    Attributes:
        filled_s: seconds of what it holds; negative offsets express that a slot may run longer.
        room_tokens: tokens it can still take.
        degree: ranks of its group; work is divided by it.
    """

    filled_s: float
    room_tokens: int
    degree: int
    samples: list[int] = field(default_factory=list)


def fill(slots: Sequence[Slot], samples: Sequence[int], problem: Problem) -> bool:
    """Put each sample, in the order given, into the least filled slot that has room; in place.

    Give the samples by falling work: this is LPT, at most 4/3 of the optimum where memory does not bind.
    Returns whether all found a slot.

    Complexity: O(K log S) while memory does not bind, O(K·S log S) at worst.
    """
    work_s, loads = problem.work_s.tolist(), problem.loads
    smallest = [0] * len(samples)  # the least tokens still to come: slots with less room are done
    least = problem.cluster.capacity_tokens
    for index in range(len(samples) - 1, -1, -1):
        least = min(least, loads[samples[index]].tokens)
        smallest[index] = least
    heap = [(slot.filled_s, index) for index, slot in enumerate(slots)]
    heapq.heapify(heap)
    for index, position in enumerate(samples):
        tokens = loads[position].tokens
        passed = []
        while heap:
            entry = heapq.heappop(heap)
            slot = slots[entry[1]]
            if slot.room_tokens >= tokens:
                break
            if slot.room_tokens >= smallest[index]:
                passed.append(entry)
        else:
            return False
        slot.samples.append(position)
        slot.room_tokens -= tokens
        slot.filled_s += work_s[position] / slot.degree
        heapq.heappush(heap, (slot.filled_s, entry[1]))
        for other in passed:
            heapq.heappush(heap, other)
    return True


def room_tokens(problem: Problem, degree: int) -> int:
    """Tokens that surely fit on a group of `degree`, whichever whole samples are among them."""
    longest_whole = max(problem.whole_below_tokens - 1, 0)
    return degree * problem.cluster.tokens_per_rank - (degree - 1) * longest_whole


def shelves(packs: Sequence[Pack], problem: Problem) -> tuple[Wave, ...]:
    """Deal packs into waves: by falling time, each into the first wave with enough free ranks.

    Packs of like duration meet in a wave, so little is lost to the longest (first-fit decreasing height).
    """
    seconds = [problem.seconds(pack) for pack in packs]
    order = sorted(range(len(packs)), key=lambda index: (-seconds[index], -packs[index].degree, index))
    waves: list[list[Pack]] = []
    free: list[int] = []
    for index in order:
        pack = packs[index]
        wave = next((w for w, ranks in enumerate(free) if ranks >= pack.degree), len(free))
        if wave == len(free):
            waves.append([])
            free.append(problem.ranks)
        waves[wave].append(pack)
        free[wave] -= pack.degree
    return tuple(tuple(wave) for wave in waves)
