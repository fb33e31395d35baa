"""From samples to a plan: the one call that everything above the planner uses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, LengthsError, SampleTooLongError, UnknownNameError
from flexcp.core.layout import default_whole_below_tokens
from flexcp.core.plan import ExchangeKind, Mode, Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel
from flexcp.planner.exchanges import plan_bound
from flexcp.planner.policies import flexcp, flexsp, megatron_dynamic, paper, static, ulysses
from flexcp.planner.problem import Assignment, Problem
from flexcp.planner.timeline import makespan_s, schedule


def _scheduled(assign: Callable[[Problem], Assignment]) -> Callable[[Problem], tuple[Task, ...]]:
    return lambda problem: schedule(problem, assign(problem))


POLICIES: dict[str, Callable[[Problem], tuple[Task, ...]]] = {
    "flexcp": flexcp.plan_tasks,
    "paper": _scheduled(paper.assign),
    "flexsp": _scheduled(flexsp.assign),
    "megatron-dynamic": _scheduled(megatron_dynamic.assign),
    "ulysses": _scheduled(ulysses.assign),
    "static": _scheduled(static.assign),
}
# Exchanges of policies that run no rings. `flexcp` searches with rings; then each group gets the fastest.
_EXCHANGES: dict[str, ExchangeKind] = {"ulysses": "all-to-all", "flexsp": "all-to-all"}
MODES: tuple[Mode, ...] = ("lockstep", "free-running")


def make_plan(
    samples: Sequence[Sample],
    cluster: Cluster,
    cost: CostModel,
    *,
    policy: str = "flexcp",
    mode: Mode = "free-running",
    whole_below_tokens: int | None = None,
) -> Plan:
    """Plan one global batch. A pure function: same input, same plan, on every rank.

    Args:
        samples: the global batch.
        cluster: ranks, nodes and tokens per rank.
        cost: seconds of packs.
        policy: a name of `POLICIES`.
        mode: `free-running`, which is how the engine runs, or `lockstep`; see `core.plan.Plan`.
        whole_below_tokens: samples shorter than this are never cut; at most half of the tokens per rank.
            Default: 512, or half of the tokens per rank if that is less.

    Raises:
        SampleTooLongError: the longest sample needs more ranks than there are.
        UnknownNameError: no such policy or mode.
        ConfigError: `whole_below_tokens` out of range.
        LengthsError: no samples.

    >>> from flexcp.core.sample import samples_from_lengths
    >>> from flexcp.cost.model import Link
    >>> link = Link(1e6, 1e-3)
    >>> cost = CostModel(1e-8, 1e-3, 0.0, 0.1, 0.0, 2000.0, 1, link, link)
    >>> plan = make_plan(samples_from_lengths([50_000, 6_000, 300]), Cluster(8, 8192), cost)
    >>> [(task.samples, task.degree) for task in plan.tasks]
    [((0,), 7), ((1, 2), 1)]
    """
    if policy not in POLICIES:
        raise UnknownNameError("policy", policy, POLICIES)
    if mode not in MODES:
        raise UnknownNameError("mode", mode, MODES)
    cost = cost.with_exchange(_EXCHANGES.get(policy, "ring"))
    problem = _problem(samples, cluster, cost, mode, whole_below_tokens)
    with _no_collection():
        tasks = POLICIES[policy](problem)
    return Plan(
        policy=policy,
        mode=mode,
        cluster=cluster,
        whole_below_tokens=problem.whole_below_tokens,
        samples=tuple(samples),
        tasks=tasks,
        bound_s=plan_bound(problem, makespan_s(tasks)).seconds,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Plans are many small values without cycles; looking for cycles among them would cost a sixth more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Planner:
    """`make_plan` with everything but the samples fixed; a value, so it can be sent to another process."""

    cluster: Cluster
    cost: CostModel
    policy: str = "flexcp"
    mode: Mode = "free-running"
    whole_below_tokens: int | None = None

    @property
    def uncut_below_tokens(self) -> int:
        """`whole_below_tokens`, or its default."""
        if self.whole_below_tokens is not None:
            return self.whole_below_tokens
        return default_whole_below_tokens(self.cluster.tokens_per_rank)

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        """Plan one global batch; see `make_plan`."""
        return make_plan(
            samples,
            self.cluster,
            self.cost,
            policy=self.policy,
            mode=self.mode,
            whole_below_tokens=self.whole_below_tokens,
        )


def _problem(
    samples: Sequence[Sample], cluster: Cluster, cost: CostModel, mode: Mode, whole_below_tokens: int | None
) -> Problem:
    if not samples:
        raise LengthsError("there are no samples to plan", "Give at least one sample.")
    longest = max(samples, key=lambda sample: sample.tokens)
    if cluster.min_degree(longest.tokens) > cluster.ranks:
        raise SampleTooLongError(longest.id, longest.tokens, cluster.tokens_per_rank, cluster.ranks)
    most = cluster.tokens_per_rank // 2
    if whole_below_tokens is None:
        whole_below_tokens = default_whole_below_tokens(cluster.tokens_per_rank)
    if not 0 <= whole_below_tokens <= most:
        raise ConfigError(
            f"whole_below_tokens is {whole_below_tokens}, with {cluster.tokens_per_rank} tokens per rank",
            f"Choose 0 to {most}, half of the tokens per rank: longer samples must be free to be cut.",
        )
    return Problem.of(samples, cluster, cost, mode, whole_below_tokens)
