"""Everything that can be wrong with a plan, each named; nothing is repaired.

The judge is independent of the planner: memory is counted row by row from the layout that will run.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise

from flexcp.core.layout import heads_divide
from flexcp.core.plan import EXCHANGE_KINDS, Plan, Task
from flexcp.cost.model import CostModel, Load
from flexcp.planner.placement import crosses_nodes

# Ends are sums of starts and durations, so differences carry rounding.
_RELATIVE = 1e-9


def check(plan: Plan, cost: CostModel | None = None) -> tuple[str, ...]:
    """List every violation; empty means the plan can run.

    With a cost model, the times of the tasks and the bound are compared with it too.

    Waiting in a circle: ranks take their tasks in the order of `plan.tasks`, and `_replay` runs their queues
    event by event until nothing can start. Memory: a rank runs one task at a time, since none may start
    before its rank's last has ended, so the rows of each task on its fullest rank are the peak.

    Complexity: O(K + Σ samples · degree over tasks).
    """
    found = [*_samples(plan), *_groups(plan)]
    if found:
        return tuple(found)  # what follows relies on valid positions and ranks
    found += [*_memory(plan), *_order(plan), *_times(plan), *_replay(plan)]
    if cost is not None:
        found += _predictions(plan, cost)
    return tuple(found)


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
    for rank in range(plan.cluster.ranks):
        mine = [plan.tasks[index] for index in plan.tasks_of(rank)]
        for earlier, later in pairwise(mine):
            if later.start_s < _before(earlier.end_s):
                yield f"rank {rank} starts at {later.start_s} s what must wait until {earlier.end_s} s"


def _lockstep_times(plan: Plan) -> Iterator[str]:
    ended_s = 0.0
    for wave in plan.waves:
        for task in wave:
            if task.start_s < _before(ended_s):
                yield f"wave {task.wave} starts at {task.start_s} s, before earlier waves end at {ended_s} s"
        ended_s = max(ended_s, *(task.end_s for task in wave))


def _replay(plan: Plan) -> Iterator[str]:
    """Runs the queues of all ranks: a task starts when it heads the queue of each of its ranks."""
    queues = {rank: deque(plan.tasks_of(rank)) for rank in range(plan.cluster.ranks)}
    heading: Counter[int] = Counter(queue[0] for queue in queues.values() if queue)
    ready = deque(k for k, count in heading.items() if count == plan.tasks[k].degree)
    ended = 0
    while ready:
        number = ready.popleft()
        ended += 1
        for rank in plan.tasks[number].ranks:
            queues[rank].popleft()
            if queues[rank]:
                following = queues[rank][0]
                heading[following] += 1
                if heading[following] == plan.tasks[following].degree:
                    ready.append(following)
    if ended < len(plan.tasks):
        stuck = sorted({queue[0] for queue in queues.values() if queue})
        yield f"tasks {stuck} wait for each other"


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
    load = Load()
    for sample in plan.pack(task):
        load = load + Load.of(sample, plan.whole_below_tokens)
    timed = cost.with_exchange(task.exchange)
    seconds = timed.task_s(load, task.degree, crosses_nodes(task.ranks, plan.cluster))
    return seconds / plan.cluster.speed(task.ranks)


def _before(seconds: float) -> float:
    return seconds * (1 - _RELATIVE)
