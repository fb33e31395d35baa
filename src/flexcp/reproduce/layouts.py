"""Seconds of a step under every layout that is compared: planned, fair static, and static as published.

The published layouts are modelled as weak as they were: one degree for the longest context, every row of
samples filled up to that context, the filling attended. `fair` is what a static layout should be compared by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from flexcp.core.cluster import Cluster
from flexcp.core.errors import InfeasibleError
from flexcp.core.layout import default_whole_below_tokens
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.core.plan import ExchangeKind, Mode
from flexcp.core.sample import Sample
from flexcp.cost import CostModel, Load, cost_model, hardware
from flexcp.cost.encoder import encoder_pairs
from flexcp.planner import make_plan
from flexcp.planner.policies import static
from flexcp.planner.problem import Problem
from flexcp.planner.timeline import makespan_s, schedule
from flexcp.reproduce.workloads import Workload

HARDWARE = "ascend-910c"
RANKS_PER_NODE = 16  # 4 nodes of 16 in the paper
TOKENS_PER_RANK = 8192  # the budget of the released Qwen3-VL scripts; InternVL3: 9216, then 8704
# FCP passes micro-batch by micro-batch; FlexCP's engine lets ranks run freely.
POLICY_MODES: dict[str, Mode] = {"paper": "lockstep", "flexcp": "free-running"}

# Of one frame of video: InternVL3's for a tile of 448 x 448; taken to hold for Qwen3-VL too.
FRAME_TOKENS = 256

Batch = Sequence[Sample]


def cost_at(model: str, speed: float) -> CostModel:
    """Coefficients of a model on one rank of the paper's machine at a fitted share of the preset's rates."""
    return cost_model(model_shape(model), hardware(HARDWARE), speed=speed)


def cluster_of(ranks: int) -> Cluster:
    """The paper's machine."""
    return Cluster(ranks, TOKENS_PER_RANK, RANKS_PER_NODE)


def batches_of(data: Workload, model: str, global_batch: int, steps: int, seed: int) -> tuple[Batch, ...]:
    """Global batches as a model sees them: clips are frames, which its vision encoder takes one by one."""
    batches = data.batches(global_batch, steps, seed)
    shape = model_shape(model)
    if data.unit != "s" or shape.encoder is None:
        return batches
    return tuple(tuple(in_frames(sample, shape) for sample in batch) for batch in batches)


def in_frames(sample: Sample, shape: ModelShape) -> Sample:
    """A clip as frames of 256 tokens, the last one shorter."""
    return Sample(sample.id, sample.tokens, encoder_pairs=_pairs_of_clip(sample.tokens, shape))


@lru_cache(maxsize=1 << 16)
def _pairs_of_clip(tokens: int, shape: ModelShape) -> int:
    if shape.encoder is None:
        return 0
    frames, rest = divmod(tokens, FRAME_TOKENS)
    images = [FRAME_TOKENS] * frames + ([rest] if rest else [])
    return encoder_pairs([n * shape.encoder.patches_per_token for n in images], shape, hardware(HARDWARE))


def planned_s(batches: Sequence[Batch], cluster: Cluster, cost: CostModel, policy: str) -> float:
    """Mean seconds of a step as a policy plans it."""
    mode = POLICY_MODES[policy]
    return fmean(make_plan(batch, cluster, cost, policy=policy, mode=mode).step_s for batch in batches)


@dataclass(frozen=True, slots=True)
class Times:
    """Mean seconds of a step under every layout, fixed ones included.

    Attributes:
        padded, unattended: the published static layout; the second does not attend to the filling.
        fair, fair_degree: the fair static layout and its degree.
        paper, flexcp: as planned by these policies.
    """

    padded: float
    unattended: float
    fair: float
    fair_degree: int
    paper: float
    flexcp: float

    def values(self) -> dict[str, float | int | str | None]:
        """Seconds and ratios under the keys that tables use."""
        return {
            "padded_s": self.padded,
            "fair_s": self.fair,
            "fair_degree": self.fair_degree,
            "paper_s": self.paper,
            "flexcp_s": self.flexcp,
            "padded_over_paper": self.padded / self.paper,
            "unattended_over_paper": self.unattended / self.paper,
            "fair_over_paper": self.fair / self.paper,
            "padded_over_flexcp": self.padded / self.flexcp,
            "fair_over_flexcp": self.fair / self.flexcp,
            "paper_over_flexcp": self.paper / self.flexcp,
        }


def every_layout(
    batches: Sequence[Batch],
    cluster: Cluster,
    cost: CostModel,
    *,
    exchange: ExchangeKind,
    context_tokens: int,
    longest: int,
    fixed_s: float,
) -> Times:
    """The same batches under every layout; see the functions below."""
    padded, unattended = (
        padded_s(batches, cluster, cost, exchange, context_tokens, attended=attended)
        for attended in (True, False)
    )
    fair = fair_static(batches, cluster, cost, longest)
    return Times(
        padded=padded + fixed_s,
        unattended=unattended + fixed_s,
        fair=fair.seconds + fixed_s,
        fair_degree=fair.degree,
        paper=planned_s(batches, cluster, cost, "paper") + fixed_s,
        flexcp=planned_s(batches, cluster, cost, "flexcp") + fixed_s,
    )


@dataclass(frozen=True, slots=True)
class FairStatic:
    """The best single degree of a whole run, and its mean seconds."""

    degree: int
    seconds: float


def fair_static(batches: Sequence[Batch], cluster: Cluster, cost: CostModel, longest: int) -> FairStatic:
    """One degree for all steps, that holds the longest sample there can be: no padding, balanced packs.

    Raises:
        InfeasibleError: all ranks together do not hold the longest sample.
    """
    whole = default_whole_below_tokens(cluster.tokens_per_rank)
    problems = [Problem.of(batch, cluster, cost, "free-running", whole) for batch in batches]
    found = [
        FairStatic(degree, fmean(_fixed_s(problem, degree) for problem in problems))
        for degree in range(cluster.min_degree(longest), cluster.ranks + 1)
        if cluster.ranks % degree == 0
    ]
    if not found:
        raise InfeasibleError(
            f"{longest} tokens need {cluster.min_degree(longest)} ranks, there are {cluster.ranks}",
            "Use more ranks or a shorter context.",
        )
    return min(found, key=lambda layout: layout.seconds)


def _fixed_s(problem: Problem, degree: int) -> float:
    return min(makespan_s(schedule(problem, waves)) for waves in static.with_degree(problem, degree))


def padded_s(
    batches: Sequence[Batch],
    cluster: Cluster,
    cost: CostModel,
    exchange: ExchangeKind,
    context_tokens: int,
    *,
    attended: bool = True,
) -> float:
    """Mean seconds of a step of the published static layout.

    Degree = context / tokens per rank. A data loader deals the samples in turn to the N / degree replicas;
    each fills rows of `context_tokens`, longest first, first fit. Every row is computed at its full length.
    Replicas meet at the end of the step.

    Args:
        batches: the global batches.
        cluster: ranks and tokens per rank.
        cost: seconds, of rings.
        exchange: `ring` (Megatron) or `all-to-all` (DeepSpeed, Ulysses).
        context_tokens: length of a row.
        attended: the filling of a row attends to itself like one more sample, as in the released code.
    """
    degree = cluster.min_degree(context_tokens)
    cost = heads_filled_up(cost.with_exchange(exchange), degree)
    crosses = degree > cluster.ranks_per_node
    replicas = cluster.ranks // degree
    if not replicas:
        raise InfeasibleError(
            f"rows of {context_tokens} tokens need {degree} ranks, there are {cluster.ranks}",
            "Use more ranks or a shorter context.",
        )
    seconds = []
    for batch in batches:
        dealt = [rows_of(batch[first::replicas], context_tokens) for first in range(replicas)]
        loads = [[row_load(row, context_tokens, attended=attended) for row in rows] for rows in dealt]
        seconds.append(max(sum(cost.task_s(load, degree, crosses) for load in rows) for rows in loads))
    return fmean(seconds)


def rows_of(samples: Batch, context_tokens: int) -> list[list[Sample]]:
    """First-fit decreasing.

    >>> from flexcp.core.sample import samples_from_lengths
    >>> [[s.tokens for s in row] for row in rows_of(samples_from_lengths([3, 7, 5, 4]), 10)]
    [[7, 3], [5, 4]]
    """
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -sample.tokens):
        row = next((index for index, left in enumerate(room) if left >= sample.tokens), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(context_tokens)
        rows[row].append(sample)
        room[row] -= sample.tokens
    return rows


def row_load(row: Batch, context_tokens: int, *, attended: bool) -> Load:
    """A row at its full length, every sample cut.

    >>> row_load([Sample(0, 7), Sample(1, 2)], 10, attended=True)
    Load(tokens=10, pairs=32, samples=3, cut_tokens=10, cut_samples=3, longest_whole_tokens=0)
    """
    load = Load.of_pack(row, whole_below_tokens=0)
    filling = context_tokens - load.tokens
    if not filling:
        return load
    if attended:
        return load + Load.of(Sample(0, filling), whole_below_tokens=0)
    return replace(load, tokens=context_tokens, cut_tokens=context_tokens)


def heads_filled_up(cost: CostModel, degree: int) -> CostModel:
    """Query heads filled up to a multiple of the degree, where heads are exchanged; attention pays for it."""
    if cost.exchange == "ring" or not cost.heads or cost.heads % degree == 0:
        return cost
    heads = -(-cost.heads // degree) * degree
    return replace(cost, heads=heads, pair_s=cost.pair_s * heads / cost.heads)
