"""What every policy receives and what it returns: a problem, and packs in waves.

A problem is the global batch as columns of counts, longest first, with the exact rules of memory and time.
It holds no sample contents and makes no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from flexcp.core.cluster import Cluster
from flexcp.core.errors import LengthsError
from flexcp.core.plan import Mode, Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Load
from flexcp.planner.placement import crosses_nodes

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pack:
    """Samples that run together on `degree` ranks; positions refer to `Problem.loads`.

    `ranks` is empty where placement is free to choose them.
    """

    samples: tuple[int, ...]
    load: Load
    degree: int
    ranks: tuple[int, ...] = ()


Wave = tuple[Pack, ...]
Assignment = tuple[Wave, ...]


@dataclass(frozen=True, eq=False)  # equal by identity, so that what is derived from it can be cached
class Problem:
    """One global batch on one cluster under one cost model.

    Attributes:
        counts: int64 [K, 6], a row `Load.counts` for each sample, longest first; equal samples are
            interchangeable, so their order is free.
        order: position of each row in the batch as given.
    """

    cluster: Cluster
    cost: CostModel
    mode: Mode
    whole_below_tokens: int
    counts: Integers
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, samples: Sequence[Sample], cluster: Cluster, cost: CostModel, mode: Mode, whole_below_tokens: int
    ) -> Problem:
        """Sort the samples by tokens, then pairs, then id, descending in cost. O(K log K).

        The fastest ranks get speed 1, and the cost model their speed, so that seconds are theirs everywhere.

        Raises:
            LengthsError: more query-key pairs than 64 bits can count.
        """
        cost, cluster = cost.at_speed(cluster.top_speed), cluster.with_top_speed_one()
        tokens = np.array([sample.tokens for sample in samples], dtype=np.int64)
        if float(tokens.max()) ** 2 * len(tokens) > 2.0**62:  # sums of pairs must fit into 64 bits
            raise LengthsError(
                f"{len(tokens):,} samples of up to {int(tokens.max()):,} tokens are more than can be counted",
                "Check the lengths; a smaller global batch may do.",
            )
        pairs = tokens * (tokens + 1) // 2
        for position, sample in enumerate(samples):
            if sample.spans or sample.encoder_pairs:
                pairs[position] = sample.work_pairs
        order = np.lexsort((np.array([sample.id for sample in samples]), -pairs, -tokens))
        tokens, pairs = tokens[order], pairs[order]
        cut = tokens >= whole_below_tokens
        columns = (tokens, pairs, np.ones_like(tokens), tokens * cut, cut, tokens * ~cut)
        counts = np.stack(columns, axis=1)
        return cls(cluster, cost, mode, whole_below_tokens, counts, tuple(order.tolist()))

    @classmethod
    def of_plan(cls, plan: Plan, cost: CostModel) -> Problem:
        """What a plan is an answer to, under a cost model."""
        return cls.of(plan.samples, plan.cluster, cost, plan.mode, plan.whole_below_tokens)

    @property
    def ranks(self) -> int:
        """N."""
        return self.cluster.ranks

    @property
    def size(self) -> int:
        """K, the number of samples."""
        return len(self.order)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return int(self.counts[:, 0].sum())

    @cached_property
    def rows(self) -> list[list[int]]:
        """`counts` as lists, which loops read faster."""
        rows: list[list[int]] = self.counts.tolist()
        return rows

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """`counts` as loads."""
        return tuple(Load(*row) for row in self.rows)

    @cached_property
    def columns(self) -> Array:
        """`counts` as floats, shape (6, K): what the cost model takes."""
        return np.ascontiguousarray(self.counts.T, dtype=np.float64)

    def min_degree(self, load: Load) -> int:
        """Least degree at which a pack surely fits; more than N if it never does.

        Two things must fit: all tokens into d·E, and the whole samples onto d ranks. Longest-first
        placement of W whole tokens, none longer than w, fills no rank above (W + (d - 1) w) / d.
        """
        capacity, longest = self.cluster.tokens_per_rank, load.longest_whole_tokens
        whole = load.tokens - load.cut_tokens
        for_whole = -(-(whole - longest) // (capacity - longest)) if longest else 1
        return max(self.cluster.min_degree(load.tokens), for_whole, 1)

    def fits(self, load: Load, degree: int) -> bool:
        """Whether no rank of a group of `degree` exceeds E, whatever the order of the pack."""
        return self.min_degree(load) <= degree

    def table_s(self, loads: Sequence[Load]) -> Array:
        """Seconds of each load at degrees 1..N, shape (K, N); infinite below its least degree."""
        counts = np.array([load.counts for load in loads], dtype=np.float64)
        table = self.cost.table_s(counts, self.ranks, self.cluster.ranks_per_node)
        least = np.array([self.min_degree(load) for load in loads])
        table[np.arange(1, self.ranks + 1) < least[:, None]] = np.inf
        return table

    @cached_property
    def work_s(self) -> Array:
        """Rank-seconds of each sample inside a pack, without communication and without `pack_s`."""
        tokens, pairs, samples = self.columns[:3]
        work_s: Array = self.cost.pair_s * pairs + self.cost.token_s * tokens + self.cost.sample_s * samples
        return work_s

    @cached_property
    def total_work_s(self) -> float:
        """Sum of `work_s`, from whole-number totals, so that it does not depend on an order."""
        pairs = int(self.counts[:, 1].sum())
        cost = self.cost
        return cost.pair_s * pairs + cost.token_s * self.tokens + cost.sample_s * self.size

    def pack(self, samples: Iterable[int], degree: int, ranks: tuple[int, ...] = ()) -> Pack:
        """Pack with the total load of its samples."""
        positions = tuple(samples)
        if len(positions) == 1:
            return Pack(positions, Load(*self.rows[positions[0]]), degree, ranks)
        columns = list(zip(*[self.rows[position] for position in positions], strict=True))
        totals = [sum(column) for column in columns[:-1]] + [max(columns[-1])]
        return Pack(positions, Load(*totals), degree, ranks)

    def totals(self, samples: Sequence[Sequence[int]]) -> Integers:
        """`Load.counts` of many packs at once, shape (packs, 6)."""
        sizes = np.array([0, *map(len, samples)])
        counts = self.counts[list(chain.from_iterable(samples))]
        starts = np.cumsum(sizes)[:-1]
        totals: Integers = np.add.reduceat(counts, starts)
        totals[:, 5] = np.maximum.reduceat(counts[:, 5], starts)
        return totals

    def totals_of(self, tasks: Sequence[Task]) -> Integers:
        """`Load.counts` of tasks, whose samples are positions in the batch as given."""
        row = np.empty(self.size, dtype=np.int64)
        row[list(self.order)] = np.arange(self.size)
        return self.totals([row[list(task.samples)].tolist() for task in tasks])

    def packs(self, samples: Sequence[Sequence[int]], ranks: Sequence[tuple[int, ...]]) -> list[Pack]:
        """Many packs at once, each on its ranks."""
        return [
            Pack(tuple(positions), Load(*row), len(group), group)
            for positions, row, group in zip(samples, self.totals(samples).tolist(), ranks, strict=True)
        ]

    def seconds(self, pack: Pack) -> float:
        """Seconds of a pack, taken to lie inside a node where it can, on ranks of full speed."""
        crosses = pack.degree > self.cluster.ranks_per_node
        return self.cost.task_s(pack.load, pack.degree, crosses)

    def seconds_on_ranks(self, pack: Pack) -> float:
        """Seconds of a pack on the ranks that it has."""
        crosses = pack.degree > 1 and crosses_nodes(pack.ranks, self.cluster)
        return self.cost.task_s(pack.load, pack.degree, crosses) / self.cluster.speed(pack.ranks)
