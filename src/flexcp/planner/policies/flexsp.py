"""Policy `flexsp`: groups of different powers of two, chosen by integer programming (arXiv 2412.01523).

The original sorts the batch, cuts it into micro-batches of like lengths and equal tokens, puts the lengths
of each into a few buckets by dynamic programming, and lets a solver choose groups and how many samples of
each bucket every group takes, so that the slowest group is fastest. It tries five micro-batch counts, and
stops SCIP after 5 to 15 seconds.

Like the original, groups exchange heads (Ulysses), so heads limit their degrees. Ours differs in:

- the programme: groups of one degree are counted, not told apart, which takes away the symmetry that makes
  the original slow. The time limit C is found by bisection, and the samples of one degree are spread over
  its groups longest first. HiGHS (through scipy) stops after a number of nodes, never by the clock, so the
  plan is the same on any machine;
- where no groups are found for a micro-batch, packs at their least powers of two fill waves of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import InfeasibleError, UnsupportedError
from flexcp.core.layout import heads_divide
from flexcp.cost.model import Load
from flexcp.planner.balance import Slot, fill, room_tokens, shelves
from flexcp.planner.problem import Assignment, Pack, Problem, Wave
from flexcp.planner.timeline import assignment_s

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_BUCKETS = 16
_MICRO_BATCH_COUNTS = 5
_BISECTIONS = 6
# What is tried, relative to the least C: with real samples in place of buckets, a little more can be better.
_LIMITS = (1.0, 1.05, 1.1, 1.2, 1.4, 2.0)
_MOST_NODES, _RELATIVE_GAP = 50, 0.02


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Samples that the solver does not tell apart; the longest stands for all."""

    samples: list[int]
    load: Load


def assign(problem: Problem) -> Assignment:
    """The best of a few micro-batch counts, from the least that memory allows; a micro-batch is a wave.

    Complexity: that of integer programming with log2(N) * 17 variables, some dozens of times a micro-batch.

    Raises:
        UnsupportedError: the cost model does not know the heads.
        InfeasibleError: the power of two that the longest sample needs exceeds N, or what the heads allow.
    """
    if not problem.cost.heads:
        raise UnsupportedError("the cost model has no head counts", "Build it with `cost_model(shape, ...)`.")
    needed = problem.min_degree(problem.loads[0])
    if (degree := _power_of_two(needed)) > problem.ranks:
        raise InfeasibleError(
            f"needs degree {degree}, the next power of two of {needed}; there are {problem.ranks} ranks",
            "Raise the tokens per rank.",
        )
    if degree > (widest := int(_allowed_degrees(problem)[-1])):
        heads = f"{problem.cost.heads} query, {problem.cost.kv_heads} key/value heads"
        room = -(-problem.loads[0].tokens // widest)
        raise InfeasibleError(
            f"needs degree {degree}, heads allow {widest} ({heads})",
            f"Rings have no such limit; or raise the tokens per rank to {room}.",
        )
    least = max(1, -(-problem.tokens // problem.cluster.capacity_tokens))
    counts = range(least, min(least + _MICRO_BATCH_COUNTS, len(problem.loads) + 1))
    candidates = [_plan(problem, count) for count in counts]
    return min(candidates, key=lambda waves: assignment_s(problem, waves))


def _power_of_two(degree: int) -> int:
    return 1 << (degree - 1).bit_length()


def _allowed_degrees(problem: Problem) -> Counts:
    """Powers of two up to N that heads can be dealt out to; with one, all lower ones."""
    powers = [1 << power for power in range(problem.ranks.bit_length())]
    cost = problem.cost
    return np.array([degree for degree in powers if heads_divide(cost.heads, cost.kv_heads, degree)])


def _plan(problem: Problem, count: int) -> Assignment:
    waves: list[Wave] = []
    for samples in _micro_batches(problem, count):
        wave = _solve(problem, samples)
        waves += [wave] if wave else _greedy(problem, samples)
    return tuple(waves)


def _micro_batches(problem: Problem, count: int) -> list[list[int]]:
    """Up to `count` runs of the samples, longest first, whose most tokens are least."""
    tokens = [load.tokens for load in problem.loads]
    low, high = max(tokens), sum(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(tokens, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _runs(tokens, low)


def _runs(tokens: Sequence[int], most: int) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    filled = 0
    for sample, count in enumerate(tokens):
        if filled + count > most:
            runs.append([])
            filled = 0
        runs[-1].append(sample)
        filled += count
    return runs


def _buckets(problem: Problem, samples: Sequence[int]) -> list[_Bucket]:
    """At most 16 runs of samples with the least tokens added if each were as long as its longest.

    cost[j] is the least for the first j samples; one more bucket a pass. Complexity: O(buckets · K²).
    """
    tokens = np.array([problem.loads[sample].tokens for sample in samples])
    size = len(tokens)
    before = np.concatenate([[0], np.cumsum(tokens)])
    start, stop = np.arange(size)[:, None], np.arange(1, size + 1)[None, :]
    added = tokens[:, None] * (stop - start) - (before[stop] - before[start])  # samples start .. stop - 1
    added = np.where(stop > start, added, np.iinfo(np.int64).max // 4)
    cost = added[0]
    firsts: list[npt.NDArray[np.int64]] = [np.zeros(size, dtype=np.int64)]
    for _ in range(min(_BUCKETS, size) - 1):
        table = np.concatenate([[0], cost[:-1]])[:, None] + added
        firsts.append(table.argmin(axis=0))
        cost = table.min(axis=0)
    found: list[_Bucket] = []
    end = size
    for first in reversed(firsts):
        if end:
            begin = int(first[end - 1])
            found.append(_Bucket(list(samples[begin:end]), problem.loads[samples[begin]]))
            end = begin
    return found[::-1]


def _solve(problem: Problem, samples: Sequence[int]) -> Wave | None:
    """Groups and their samples for one wave; None where none were found."""
    programme = _Programme(problem, _buckets(problem, samples))
    if (least_s := programme.least_limit_s()) is None:
        return None
    solutions = [programme.solve(factor * least_s) for factor in _LIMITS]
    waves = [wave for solution in solutions if solution and (wave := programme.wave(*solution))]
    return min(waves, key=lambda wave: max(map(problem.seconds, wave)), default=None)


class _Programme:
    """The integer programme of one micro-batch, for a time limit C.

    Variables: n_d, groups of degree d = 1, 2, 4, ...; A_dq, samples of bucket q on groups of degree d.
    Minimise the ranks used, subject to

        Σ_q A_dq t_q(d) <= (C - fixed(d)) n_d       every group could end by C
        Σ_q A_dq tokens_q <= room(d) n_d            memory
        Σ_d A_dq = samples of bucket q,   Σ_d d n_d <= N

    and A_dq = 0 where one sample alone exceeds C. t_q(d) is the time of the longest sample of the bucket
    beyond what a pack costs in any case, so overlap is taken sample by sample.
    """

    def __init__(self, problem: Problem, buckets: list[_Bucket]) -> None:
        self._problem, self._buckets = problem, buckets
        self._degrees = _allowed_degrees(problem)
        empty = problem.table_s([Load(samples=1, cut_samples=1)])[0, self._degrees - 1]
        self._fixed_s = empty - problem.cost.sample_s
        table_s = problem.table_s([bucket.load for bucket in buckets])[:, self._degrees - 1].T
        self._seconds = np.maximum(table_s - self._fixed_s[:, None], 0.0)
        self._rooms = np.array([room_tokens(problem, int(degree)) for degree in self._degrees])
        # A lone sample may exceed the room for mixtures; it then fills its group.
        tokens = np.array([bucket.load.tokens for bucket in buckets])
        self._tokens = np.minimum(tokens, self._rooms[:, None])
        self._counts = np.array([len(bucket.samples) for bucket in buckets])

    def least_limit_s(self) -> float | None:
        """The least C that has a solution, by doubling and bisection; None where memory allows none."""
        longest_s = float((self._seconds + self._fixed_s[:, None]).min(axis=0).max())
        all_s = longest_s + float((self._seconds.min(axis=0) * self._counts).sum())
        low = high = max(longest_s, all_s / self._problem.ranks)
        while self.solve(high) is None:
            if high >= all_s:
                return None
            low, high = high, 2 * high
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            if self.solve(middle) is None:
                low = middle
            else:
                high = middle
        return high

    def solve(self, limit_s: float) -> tuple[Counts, Counts] | None:
        """Groups per degree, and samples taken [degrees, buckets]; None where there is no solution."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and only here

        degrees, buckets = self._seconds.shape
        allowed = self._seconds + self._fixed_s[:, None] <= limit_s
        if not allowed.any(axis=0).all():
            return None
        per_degree = np.kron(np.eye(degrees), np.ones(buckets))
        ends = per_degree * np.where(allowed, self._seconds, 0.0).ravel() / limit_s
        memory = per_degree * self._tokens.ravel() / self._problem.cluster.tokens_per_rank
        rooms = self._rooms / self._problem.cluster.tokens_per_rank
        rows = np.block(
            [
                [np.diag(self._fixed_s / limit_s - 1.0), ends],
                [np.diag(-rooms), memory],
                [self._degrees, np.zeros(degrees * buckets)],
                [np.zeros((buckets, degrees)), np.tile(np.eye(buckets), degrees)],
            ]
        )
        most = np.concatenate([np.zeros(2 * degrees), [self._problem.ranks], self._counts])
        least = np.concatenate([np.full(2 * degrees + 1, -np.inf), self._counts])
        taken_at_most = np.where(allowed, self._counts, 0).ravel()
        result = milp(
            c=np.concatenate([self._degrees, np.zeros(degrees * buckets)]),
            integrality=np.ones(degrees * (1 + buckets)),
            bounds=Bounds(0, np.concatenate([self._problem.ranks // self._degrees, taken_at_most])),
            constraints=LinearConstraint(rows, least, most),
            options={"node_limit": _MOST_NODES, "mip_rel_gap": _RELATIVE_GAP},
        )
        if result.x is None:
            return None
        values = np.rint(result.x).astype(np.int64)
        return values[:degrees], values[degrees:].reshape(degrees, buckets)

    def wave(self, groups: Counts, taken: Counts) -> Wave | None:
        """Packs of a solution: wide degrees get the longest of a bucket; None where memory is in the way."""
        problem = self._problem
        queues = [list(bucket.samples) for bucket in self._buckets]
        packs: list[Pack] = []
        for index in reversed(range(len(self._degrees))):
            degree = int(self._degrees[index])
            mine = []
            for queue, count in zip(queues, taken[index].tolist(), strict=True):
                mine += queue[:count]
                del queue[:count]
            room = max(int(self._rooms[index]), *(problem.loads[k].tokens for k in mine)) if mine else 0
            slots = [Slot(0.0, room, degree) for _ in range(int(groups[index]))]
            if not fill(slots, mine, problem):
                return None
            packs += [problem.pack(slot.samples, degree) for slot in slots if slot.samples]
        return tuple(packs) if all(problem.fits(pack.load, pack.degree) for pack in packs) else None


def _greedy(problem: Problem, samples: Sequence[int]) -> Assignment:
    """Best-fit packs at their least powers of two, in waves."""
    members: list[list[int]] = []
    loads: list[Load] = []
    degrees: list[int] = []
    for sample in samples:
        load = problem.loads[sample]
        holding = (k for k, other in enumerate(loads) if problem.fits(other + load, degrees[k]))
        if (index := next(holding, None)) is None:
            index = len(loads)
            members.append([])
            loads.append(Load())
            degrees.append(_power_of_two(problem.min_degree(load)))
        members[index].append(sample)
        loads[index] = loads[index] + load
    return shelves([problem.pack(m, degree) for m, degree in zip(members, degrees, strict=True)], problem)
