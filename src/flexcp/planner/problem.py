"""What every policy receives and what it returns: a problem, and packs in waves.

A problem is the global batch as loads, longest first, with the exact rules of memory and time. It holds
no sample contents and makes no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Mode
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Load

Array = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class Problem:
    """One global batch on one cluster under one cost model.

    Attributes:
        loads: one per sample, longest first; equal samples are interchangeable, so their order is free.
        order: position of each load in the batch as given.
    """

    cluster: Cluster
    cost: CostModel
    mode: Mode
    whole_below_tokens: int
    loads: tuple[Load, ...]
    order: tuple[int, ...]

    @classmethod
    def of(
        cls, samples: Sequence[Sample], cluster: Cluster, cost: CostModel, mode: Mode, whole_below_tokens: int
    ) -> Problem:
        """Sort the samples by tokens, then pairs, then id, descending in cost."""
        key = [(-sample.tokens, -sample.attended_pairs, sample.id) for sample in samples]
        order = tuple(sorted(range(len(samples)), key=key.__getitem__))
        loads = tuple(Load.of(samples[position], whole_below_tokens) for position in order)
        return cls(cluster, cost, mode, whole_below_tokens, loads, order)

    @property
    def ranks(self) -> int:
        """N."""
        return self.cluster.ranks

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return sum(load.tokens for load in self.loads)

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
    def sample_table_s(self) -> Array:
        """`table_s` of the samples, each alone."""
        return self.table_s(self.loads)

    @cached_property
    def work_s(self) -> Array:
        """Rank-seconds of each sample inside a pack, without communication and without `pack_s`."""
        cost = self.cost
        return np.array(
            [cost.pair_s * x.pairs + cost.token_s * x.tokens + cost.sample_s * x.samples for x in self.loads]
        )

    def pack(self, samples: Iterable[int], degree: int) -> Pack:
        """Pack with the total load of its samples."""
        positions = tuple(samples)
        loads = [self.loads[position] for position in positions]
        total = Load(
            sum(load.tokens for load in loads),
            sum(load.pairs for load in loads),
            len(loads),
            sum(load.cut_tokens for load in loads),
            sum(load.cut_samples for load in loads),
            max(load.longest_whole_tokens for load in loads),
        )
        return Pack(positions, total, degree)

    def seconds(self, pack: Pack) -> float:
        """Seconds of a pack, taken to lie inside a node where it can."""
        crosses = pack.degree > self.cluster.ranks_per_node
        return self.cost.task_s(pack.load, pack.degree, crosses)
