"""The paper's time formula (arXiv 2602.21788v2, cost model): a few coefficients, evaluated in numpy.

It knows loads and degrees, never samples' contents, devices or plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import ModelShape
from flexcp.core.plan import ExchangeKind
from flexcp.core.sample import Sample
from flexcp.cost.flops import flops_per_pair, flops_per_token
from flexcp.cost.presets import Hardware

Array = npt.NDArray[np.float64]
# A count for one pack, or an array of them for many.
Counts = Any

_ALL_TO_ALLS = 2  # a layer and pass: queries, keys, values in one message; attention output back
_GRADIENT_BYTES = 4  # dK and dV travel in fp32


@dataclass(frozen=True, slots=True)
class Load:
    """What a pack holds, as far as time and memory depend on it; loads of samples add up.

    Attributes:
        tokens, pairs, samples: totals; pairs are those really attended, and the vision encoder's.
        cut_tokens, cut_samples: those that are cut over the ranks of a group, so travel around its ring.
        longest_whole_tokens: the longest sample that stays on one rank however many the group has.

    >>> Load.of(Sample(0, 4), whole_below_tokens=3) + Load.of(Sample(1, 2), whole_below_tokens=3)
    Load(tokens=6, pairs=13, samples=2, cut_tokens=4, cut_samples=1, longest_whole_tokens=2)
    """

    tokens: int = 0
    pairs: int = 0
    samples: int = 0
    cut_tokens: int = 0
    cut_samples: int = 0
    longest_whole_tokens: int = 0

    @classmethod
    def of(cls, sample: Sample, whole_below_tokens: int) -> Load:
        """Load of one sample."""
        cut = sample.tokens >= whole_below_tokens
        return cls(
            tokens=sample.tokens,
            pairs=sample.work_pairs,
            samples=1,
            cut_tokens=sample.tokens if cut else 0,
            cut_samples=int(cut),
            longest_whole_tokens=0 if cut else sample.tokens,
        )

    @classmethod
    def of_pack(cls, samples: Iterable[Sample], whole_below_tokens: int) -> Load:
        """Load of samples together."""
        return sum((cls.of(sample, whole_below_tokens) for sample in samples), cls())

    @property
    def counts(self) -> tuple[int, ...]:
        """The fields in their order: a row of what `CostModel.table_s` takes."""
        return (
            self.tokens,
            self.pairs,
            self.samples,
            self.cut_tokens,
            self.cut_samples,
            self.longest_whole_tokens,
        )

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens,
            self.pairs + other.pairs,
            self.samples + other.samples,
            self.cut_tokens + other.cut_tokens,
            self.cut_samples + other.cut_samples,
            max(self.longest_whole_tokens, other.longest_whole_tokens),
        )


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between neighbours of a ring.

    >>> print(Link(5e10, 2e-5))
    50 GB/s, 20 us
    """

    bytes_per_s: float
    latency_s: float

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e9:.3g} GB/s, {self.latency_s * 1e6:.3g} us"


INSTANT = Link(math.inf, 0.0)  # messages take no time


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one pack, forward and backward, on a group of d ranks.

    T(d) = T_cp + T_cm - min(T_cpa, T_cma), where only attention computation hides only ring traffic::

        T_cpa = pair_s * pairs / d                                   the quadratic term, (1 + η) in the pairs
        T_cp  = T_cpa + token_s * tokens / d
                + sample_s * (whole_samples / d + d * cut_samples)       each ring step handles every cut one
                + pack_s + (d - 1) * ring_step_s                         work that a ring step adds
        T_cm  = T_cma = (d - 1) * (kv_bytes_per_token * cut_tokens / d / bandwidth
                                   + layers * passes * latency)      0 without cut samples

    Beside the constants one thing is added to the paper's form: a sample that is never cut takes its own
    time however wide its group is, so no term falls below that of the longest whole sample.

    With `exchange="gather"` the same bytes come at once, one latency a pass, and all keys of the others are
    one ring step. Only attention to the rank's own rows, 1/d of it, hides them::

        T_cpa = pair_s * pairs / d / d,   one ring_step_s,   every cut sample is handled twice
        T_cm  = (d - 1) * kv_bytes_per_token * cut_tokens / d / bandwidth + layers * passes * latency

    With `exchange="all-to-all"` (Ulysses) ranks hold all rows of some heads during attention. Nothing hides
    the exchange, and key/value heads are repeated up to the degree::

        T_cpa = 0,   no ring_step_s,   every cut sample is handled once
        T_cm  = head_bytes_per_token * (2 * heads + 2 * max(kv_heads, d))
                * cut_tokens / d * (d - 1) / d / bandwidth + layers * passes * 2 * latency

    Attributes:
        pair_s, token_s, sample_s, pack_s: seconds per attended pair, per token, per sample and block of its
            keys, per pack.
        ring_step_s: seconds of work (launches, merging) that one more ring step costs, without cut samples 0.
        kv_bytes_per_token: what one cut token sends per ring step over a whole step, all layers: K and V
            in every pass, and dK and dV in the backward pass.
        layers, passes: the ring is walked layers x passes times (forward, recomputation, backward).
        intra, inter: links inside a node and across nodes; a group is as fast as its slowest link.
        heads, kv_heads: query and key/value heads, 0 where unknown; only the all-to-all asks.
        head_bytes_per_token: what one token of one head moves over a whole step, all layers and passes.
        exchange: how the ranks of a group meet.

    Raises:
        ConfigError: the link across nodes is faster than the one inside.

    >>> link = Link(bytes_per_s=100.0, latency_s=0.5)
    >>> cost = CostModel(1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 1, link, link, passes=1)
    >>> load = Load(tokens=4, pairs=10, samples=1, cut_tokens=4, cut_samples=1)
    >>> cost.task_s(load, 1)                # 10 + 2 * 4 + 3 + 4
    25.0
    >>> cost.task_s(load, 2)                # 5 + 8 / 2 + 2 * 3 + 4 + 5 + 0.7 - min(5, 0.7)
    24.0
    """

    pair_s: float
    token_s: float
    sample_s: float
    pack_s: float
    ring_step_s: float
    kv_bytes_per_token: float
    layers: int
    intra: Link
    inter: Link
    passes: int = 2
    heads: int = 0
    kv_heads: int = 0
    head_bytes_per_token: float = 0.0
    exchange: ExchangeKind = "ring"

    def __post_init__(self) -> None:
        # Bounds and placement take a group that can lie inside a node to be fastest there.
        if self.inter.bytes_per_s > self.intra.bytes_per_s or self.inter.latency_s < self.intra.latency_s:
            raise ConfigError(
                f"links across nodes ({self.inter}) are faster than inside a node ({self.intra})",
                "Give the slower link as inter, or the same for both.",
            )

    def at_speed(self, speed: float) -> CostModel:
        """The same on ranks and links of another speed.

        >>> link = Link(100.0, 0.5)
        >>> CostModel(1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 1, link, link).at_speed(2.0).token_s
        1.0
        """
        return replace(
            self,
            pair_s=self.pair_s / speed,
            token_s=self.token_s / speed,
            sample_s=self.sample_s / speed,
            pack_s=self.pack_s / speed,
            ring_step_s=self.ring_step_s / speed,
            intra=Link(self.intra.bytes_per_s * speed, self.intra.latency_s / speed),
            inter=Link(self.inter.bytes_per_s * speed, self.inter.latency_s / speed),
        )

    def with_exchange(self, exchange: ExchangeKind) -> CostModel:
        """The same machine and model, other messages."""
        return self if exchange == self.exchange else replace(self, exchange=exchange)

    def silent(self) -> CostModel:
        """The same where messages take no time; merging what they bring still does.

        >>> link = Link(1.0, 0.5)
        >>> CostModel(1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 1, link, link).silent().task_s(Load(4, 10, 1, 4, 1), 2)
        24.0
        """
        return replace(self, intra=INSTANT, inter=INSTANT)

    def task_s(self, load: Load, degree: int, crosses_nodes: bool = False) -> float:
        """Seconds of one pack at one degree; `crosses_nodes` if its ring uses links between nodes."""
        link = self.inter if crosses_nodes else self.intra
        return float(self._seconds(load.counts, degree, link.bytes_per_s, link.latency_s, max))

    def seconds(self, columns: Counts, degree: Counts, crosses_nodes: Counts) -> Array:
        """Seconds of many packs, each at degrees of its own.

        Args:
            columns: shape (6, ...), the fields of `Load`; what follows broadcasts with the rest of it.
            degree: ranks of each group.
            crosses_nodes: whether its ring uses links between nodes.
        """
        bytes_per_s = np.where(crosses_nodes, self.inter.bytes_per_s, self.intra.bytes_per_s)
        latency_s = np.where(crosses_nodes, self.inter.latency_s, self.intra.latency_s)
        seconds: Array = self._seconds(columns, degree, bytes_per_s, latency_s, np.maximum)
        return seconds

    def times_s(self, load: Load, max_degree: int, ranks_per_node: int | None = None) -> Array:
        """Seconds of one pack at degrees 1..max_degree; entry d - 1 is degree d.

        Groups of up to `ranks_per_node` ranks (default: any) are taken to lie inside a node.
        """
        table = self.table_s(np.array([load.counts], dtype=np.float64), max_degree, ranks_per_node)
        return np.asarray(table[0])

    def table_s(self, counts: Array, max_degree: int, ranks_per_node: int | None = None) -> Array:
        """Seconds of K packs at degrees 1..max_degree, shape (K, max_degree).

        Args:
            counts: shape (K, 6), a row `Load.counts` for each pack.
            max_degree: last degree.
            ranks_per_node: as in `times_s`.
        """
        degree = np.arange(1, max_degree + 1)
        return self.seconds(counts.T[:, :, None], degree, degree > (ranks_per_node or max_degree))

    def _seconds(
        self,
        counts: Counts,
        degree: Counts,
        bytes_per_s: Counts,
        latency_s: Counts,
        larger: Callable[[Counts, Counts], Counts],
    ) -> Counts:
        """The formula; scalars and `max` for one pack, or arrays that broadcast and `np.maximum`."""
        tokens, pairs, samples, cut_tokens, cut_samples, whole_tokens = counts
        whole_pairs = whole_tokens * (whole_tokens + 1) / 2
        attention = self.pair_s * larger(pairs / degree, whole_pairs)
        linear = self.token_s * larger(tokens / degree, whole_tokens)
        steps = (degree - 1) * (cut_samples > 0)
        rows_s = cut_tokens / degree / bytes_per_s
        latency_s = self.layers * self.passes * latency_s
        if self.exchange == "ring":
            communication = steps * (self.kv_bytes_per_token * rows_s + latency_s)
            # T_cpa + T_cm - min(T_cpa, T_cma), with T_cm = T_cma, is the larger of the two.
            exposed, merging, blocks = larger(attention, communication), steps * self.ring_step_s, degree
        elif self.exchange == "gather":
            communication = steps * self.kv_bytes_per_token * rows_s + (steps > 0) * latency_s
            own = attention / degree
            exposed, merging = attention - own + larger(own, communication), (steps > 0) * self.ring_step_s
            blocks = 1 + (steps > 0)
        else:
            head_bytes = self.head_bytes_per_token * (2 * self.heads + 2 * larger(self.kv_heads, degree))
            communication = steps * head_bytes * rows_s / degree + (steps > 0) * _ALL_TO_ALLS * latency_s
            exposed, merging, blocks = attention + communication, 0.0, 1
        whole = larger((samples - cut_samples) / degree, whole_tokens > 0)
        handling = self.sample_s * (whole + blocks * cut_samples)
        return exposed + linear + handling + self.pack_s + merging


def cost_model(
    shape: ModelShape, hardware: Hardware, *, checkpointing: bool = True, speed: float = 1.0
) -> CostModel:
    """Coefficients from counted FLOPs and named hardware.

    Args:
        shape: the model one rank runs.
        hardware: what one rank is.
        checkpointing: layers are recomputed in the backward pass, with their ring traffic.
        speed: share of the hardware one rank gets, such as 0.5 when two ranks share a core.
    """
    rate = hardware.flops_per_s * speed
    passes = 3 if checkpointing else 2
    channels = 2 * shape.layers * shape.kv_heads * shape.head_dim  # K and V
    return CostModel(
        pair_s=flops_per_pair(shape, checkpointing=checkpointing) / (rate * hardware.attention_efficiency),
        token_s=flops_per_token(shape, checkpointing=checkpointing) / (rate * hardware.matmul_efficiency),
        sample_s=shape.layers * hardware.sample_overhead_s / speed,
        pack_s=shape.layers * hardware.pack_overhead_s / speed,
        ring_step_s=shape.layers * passes * hardware.ring_step_overhead_s / speed,
        kv_bytes_per_token=float(channels * (passes * hardware.element_bytes + _GRADIENT_BYTES)),
        layers=shape.layers,
        intra=Link(hardware.intra_bytes_per_s, hardware.intra_latency_s),
        inter=Link(hardware.inter_bytes_per_s, hardware.inter_latency_s),
        passes=passes,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_bytes_per_token=float(shape.layers * passes * shape.head_dim * hardware.element_bytes),
    )
