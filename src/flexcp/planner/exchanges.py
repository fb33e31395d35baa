"""How the ranks of a group meet: which exchanges a pack may use, and which of them is fastest.

Chosen when degrees and packs stand, so it only ever shortens a task. Predictions only; no messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flexcp.core.cluster import Cluster
from flexcp.core.layout import heads_divide
from flexcp.core.plan import EXCHANGE_KINDS, ExchangeKind, Task
from flexcp.cost.model import CostModel, Counts
from flexcp.planner.bounds import Bound, lower_bound
from flexcp.planner.placement import crosses_nodes
from flexcp.planner.problem import Array, Problem

# Samples with most work that are looked at by themselves.
_HEADS = 8


def fastest(
    cost: CostModel, cluster: Cluster, columns: Array, degrees: Counts, crosses: Counts
) -> tuple[Array, list[ExchangeKind]]:
    """Seconds and exchange of many packs, each by the fastest that it may use; a tie goes to the ring.

    Args:
        cost: times of packs.
        cluster: what they run on.
        columns: shape (6, packs), the fields of `Load`.
        degrees: ranks of each group.
        crosses: whether it uses links between nodes.
    """
    seconds = []
    for kind in EXCHANGE_KINDS:
        timed = cost.with_exchange(kind).seconds(columns, degrees, crosses)
        seconds.append(np.where(_allowed(kind, cost, cluster, columns[3], degrees), timed, np.inf))
    chosen = np.argmin(seconds, axis=0)
    return np.min(seconds, axis=0), [EXCHANGE_KINDS[index] for index in chosen.tolist()]


def _allowed(
    kind: ExchangeKind, cost: CostModel, cluster: Cluster, cut_tokens: Array, degrees: Counts
) -> npt.NDArray[np.bool_]:
    """Whether packs may use an exchange.

    A gather holds the keys and values of all cut rows of a pack on every rank, which the budget of tokens
    does not know of; so they may take no more room than the queries of a full rank do. An all-to-all needs
    heads that can be dealt out.
    """
    if kind == "gather":
        return np.asarray(cut_tokens * max(cost.kv_heads, 1) <= cluster.tokens_per_rank * max(cost.heads, 1))
    if kind == "all-to-all":
        dealt = [d for d in range(1, cost.heads + 1) if heads_divide(cost.heads, cost.kv_heads, d)]
        return np.isin(degrees, dealt)
    return np.ones(len(degrees), dtype=bool)


def with_fastest_exchanges(problem: Problem, tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """The same tasks, each on several ranks by the fastest exchange that it may use, and started anew.

    Complexity: O(tasks + samples and ranks of those on several ranks).
    """
    wide = [number for number, task in enumerate(tasks) if task.degree > 1]
    if not wide:
        return tasks
    counts = problem.totals_of([tasks[number] for number in wide])
    cluster, groups = problem.cluster, [tasks[number].ranks for number in wide]
    degrees = np.array([len(group) for group in groups])
    crosses = np.array([crosses_nodes(group, cluster) for group in groups])
    seconds, exchanges = fastest(problem.cost, cluster, counts.astype(np.float64).T, degrees, crosses)
    speeds = np.array([cluster.speed(group) for group in groups]) if cluster.speeds else 1.0
    timed = zip(wide, (seconds / speeds).tolist(), exchanges, strict=True)
    changed = {number: (time_s, kind) for number, time_s, kind in timed if kind != tasks[number].exchange}
    return _started(problem, tasks, changed) if changed else tasks


def _started(
    problem: Problem, tasks: Sequence[Task], changed: Mapping[int, tuple[float, ExchangeKind]]
) -> tuple[Task, ...]:
    """The tasks in the same order, some of other durations: as early as their ranks, or the wave, allow."""
    started: list[Task] = []
    free_s, wave = [0.0] * problem.ranks, -1
    for number, task in enumerate(tasks):
        if problem.mode == "lockstep" and task.wave != wave:
            free_s, wave = [max(free_s)] * problem.ranks, task.wave
        ranks = task.ranks
        start_s = free_s[ranks[0]] if len(ranks) == 1 else max([free_s[rank] for rank in ranks])
        if number in changed or start_s != task.start_s:
            time_s, exchange = changed.get(number, (task.end_s - task.start_s, task.exchange))
            task = Task(task.samples, ranks, task.wave, start_s, start_s + time_s, exchange)
        for rank in ranks:
            free_s[rank] = task.end_s
        started.append(task)
    return tuple(started)


def plan_bound(problem: Problem, step_s: float) -> Bound:
    """Seconds that no plan can beat with the exchange of the problem's cost model for every group.

    A plan that mixes exchanges can fall below. Then it is what no plan can beat by any exchange, the larger
    of two: the bound of a cost model that none of them undercuts, all-to-all in which messages and waiting
    cost nothing; and the best time of a long sample over all exchanges and degrees, as its pack has one.
    """
    bound = lower_bound(problem)
    if step_s >= bound.seconds:
        return bound
    silent = problem.cost.silent().with_exchange("all-to-all")  # handles a sample once, and merges nothing
    found = [bound, max(lower_bound(replace(problem, cost=silent)), _longest_by_any(problem))]
    return min(found, key=lambda bound: bound.seconds)


def _longest_by_any(problem: Problem) -> Bound:
    """The best time of the samples with most work, each by itself, whatever its degree and exchange."""
    cluster = problem.cluster
    heads = np.argsort(-problem.work_s, kind="stable")[:_HEADS]
    found: list[tuple[float, str]] = []
    for sample in heads.tolist():
        tokens = problem.rows[sample][0]
        degrees = np.arange(cluster.min_degree(tokens), cluster.ranks + 1)
        columns = np.repeat(problem.columns[:, sample : sample + 1], len(degrees), axis=1)
        seconds, kinds = fastest(problem.cost, cluster, columns, degrees, degrees > cluster.ranks_per_node)
        best = int(seconds.argmin())
        where = f"its best {degrees[best]} ranks by {kinds[best]}" if degrees[best] > 1 else "one rank"
        found.append((float(seconds[best]), f"the longest sample, {tokens:,} tokens, on {where}"))
    return Bound(*max(found))
