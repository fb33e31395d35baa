"""Everything that can be wrong with a plan, each named; nothing is repaired.

The judge is independent of the planner: memory is counted row by row from the layout that will run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from flexcp.core.cluster import Cluster
from flexcp.core.layout import heads_divide
from flexcp.core.plan import EXCHANGE_KINDS, Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Load
from flexcp.planner.placement import crosses_nodes

# Ends are sums of starts and durations, so differences carry rounding.
_RELATIVE = 1e-9


def check(plan: Plan, cost: CostModel | None = None) -> tuple[str, ...]:
    """List every violation; empty means the plan can run.

    With a cost model, the times of the tasks and the bound are compared with it too.

    Memory is looked at twice: of every task by itself, and of every rank at every moment by predicted times.

    Complexity: O(K log K + Σ samples · degree over tasks).
    """
    found = [*_samples(plan), *_groups(plan)]
    if found:
        return tuple(found)  # what follows relies on valid positions and ranks
    found += [*_memory(plan), *_order(plan), *_times(plan), *_moments(plan)]
    if cost is not None:
        found += _predictions(plan, cost)
    return tuple(found)


def check_answer(plan: object, samples: Sequence[Sample], cluster: Cluster) -> tuple[str, ...]:
    """Why a plan cannot run in place of the one that was asked for; times and memory are not looked at."""
    if not isinstance(plan, Plan):
        return (f"it is a {type(plan).__name__}",)
    if plan.cluster.ranks != cluster.ranks:
        return (f"it is for {plan.cluster.ranks} ranks of {cluster.ranks}",)
    if plan.samples != tuple(samples):
        return ("its samples are others than those that were to be planned",)
    return (*_samples(plan), *_groups(plan), *_order(plan))


def _samples(plan: Plan) -> Iterator[str]:
    counts = Counter(position for task in plan.tasks for position in task.samples)
    for position in range(len(plan.samples)):
        if counts[position] != 1:
            how = "is in no task" if counts[position] == 0 else f"runs {counts[position]} times"
            yield f"sample {plan.samples[position].id} {how}"
    for position in sorted(counts):
        if not 0 <= position < len(plan.samples):
            yield f"a task names position {position} of {len(plan.samples)} samples"
    for number, task in enumerate(plan.tasks):
        if not task.samples:
            yield f"task {number} holds no sample"


def _groups(plan: Plan) -> Iterator[str]:
    for number, task in enumerate(plan.tasks):
        if not task.ranks:
            yield f"task {number} has no ranks"
        if task.exchange not in EXCHANGE_KINDS:
            yield f"task {number} has exchange {task.exchange!r}"
        for rank, count in Counter(task.ranks).items():
            if not 0 <= rank < plan.cluster.ranks:
                yield f"task {number} names rank {rank} of {plan.cluster.ranks}"
            if count > 1:
                yield f"task {number} names rank {rank} {count} times"
    for wave in plan.waves:
        shared = Counter(rank for task in wave for rank in set(task.ranks))
        for rank, count in shared.items():
            if count > 1:
                yield f"rank {rank} is in {count} tasks of wave {wave[0].wave}"


def _memory(plan: Plan) -> Iterator[str]:
    limit = plan.cluster.tokens_per_rank
    for number, task in enumerate(plan.tasks):
        rows = plan.layout(task).max_rows
        if rows > limit:
            yield f"task {number} puts {rows} tokens on a rank that holds {limit}"


def _order(plan: Plan) -> Iterator[str]:
    for number in range(1, len(plan.tasks)):
        if plan.tasks[number].wave < plan.tasks[number - 1].wave:
            yield f"task {number} of wave {plan.tasks[number].wave} follows a later wave"
    if plan.mode not in ("lockstep", "free-running"):
        yield f"mode is {plan.mode!r}"


def _times(plan: Plan) -> Iterator[str]:
    for number, task in enumerate(plan.tasks):
        if not (
            math.isfinite(task.start_s) and math.isfinite(task.end_s) and 0 <= task.start_s <= task.end_s
        ):
            yield f"task {number} runs from {task.start_s} s to {task.end_s} s"
    if plan.mode == "lockstep":
        yield from _lockstep_times(plan)


def _lockstep_times(plan: Plan) -> Iterator[str]:
    ended_s = 0.0
    for wave in plan.waves:
        for task in wave:
            if task.start_s < _before(ended_s):
                yield f"wave {task.wave} starts at {task.start_s} s, before earlier waves end at {ended_s} s"
        ended_s = max(ended_s, *(task.end_s for task in wave))


def _moments(plan: Plan) -> Iterator[str]:
    """Event by event, by predicted times: a rank runs one task at a time, in the order of the list, within E.

    The order of tasks is one list for all ranks, so at any time the first unfinished task can run as soon as
    its ranks have ended what they run: waiting in a circle cannot even be written down.
    """
    events = []
    for number, task in enumerate(plan.tasks):
        ends_s = _before(task.end_s)
        events.append((task.start_s, 1, number))
        # Ends come before starts of the same moment, but not before their own.
        events.append((ends_s, 0, number) if ends_s > task.start_s else (task.start_s, 2, number))
    layouts = [plan.layout(task) for task in plan.tasks]
    running: dict[int, dict[int, int]] = {rank: {} for rank in range(plan.cluster.ranks)}
    latest = dict.fromkeys(running, -1)
    for _, kind, number in sorted(events):
        task = plan.tasks[number]
        for member, rank in enumerate(task.ranks):
            if kind != 1:
                del running[rank][number]
                continue
            if running[rank]:
                yield f"rank {rank} starts task {number} while it runs task {latest[rank]}"
            if number < latest[rank]:
                yield f"rank {rank} starts task {number} after task {latest[rank]}, a later one of the list"
            running[rank][number] = layouts[number].rows(member)
            latest[rank] = number
            if (held := sum(running[rank].values())) > plan.cluster.tokens_per_rank:
                yield f"rank {rank} holds {held} tokens at {task.start_s} s, more than it may"


def _predictions(plan: Plan, cost: CostModel) -> Iterator[str]:
    for number, task in enumerate(plan.tasks):
        if task.exchange == "all-to-all" and not heads_divide(cost.heads, cost.kv_heads, task.degree):
            heads = f"{cost.heads} query and {cost.kv_heads} key/value heads"
            yield f"task {number} exchanges {heads} among {task.degree} ranks, which do not divide them"
        expected_s = _expected_s(plan, task, cost)
        if not math.isclose(task.duration_s, expected_s, rel_tol=_RELATIVE, abs_tol=_RELATIVE * task.end_s):
            yield f"task {number} is said to take {task.duration_s} s, the cost model says {expected_s} s"
    if plan.step_s < _before(plan.bound_s):
        yield f"the step takes {plan.step_s} s, less than its bound of {plan.bound_s} s"


def _expected_s(plan: Plan, task: Task, cost: CostModel) -> float:
    load = Load.of_pack(plan.pack(task), plan.whole_below_tokens)
    timed = cost.with_exchange(task.exchange)
    seconds = timed.task_s(load, task.degree, crosses_nodes(task.ranks, plan.cluster))
    return seconds / plan.cluster.speed(task.ranks)


def _before(seconds: float) -> float:
    return seconds * (1 - _RELATIVE)
