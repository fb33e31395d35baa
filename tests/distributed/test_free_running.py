"""Free-running under strain: hundreds of tasks back to back, ranks that dawdle, one with nothing to do."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from flexcp.core.cluster import Cluster
from flexcp.core.plan import EXCHANGE_KINDS, Plan, Task
from flexcp.core.sample import Sample
from tests.distributed.test_gradients import one_step, reference
from tests.harness import run_ranks
from tests.models import relative_error, tiny_model

RANKS = (3, 0, 2)  # rank 1 has no task, so that the others are no neighbours


class ManyTasks:
    """Every sample a task of its own, on any of `RANKS` in any order; each starts when its ranks are free."""

    def __init__(self, seed: int) -> None:
        self.cluster = Cluster(4, 10**6)
        self._random = random.Random(seed)

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        free_s = dict.fromkeys(RANKS, 0.0)
        tasks: list[Task] = []
        for position in range(len(samples)):
            degree = self._random.choices((1, 2, 3), (4, 3, 1))[0]
            ranks = tuple(self._random.sample(RANKS, degree))
            kinds = EXCHANGE_KINDS if degree == 2 else ("ring", "gather")  # 2 key/value heads
            start_s = max(free_s[rank] for rank in ranks)
            kind = self._random.choice(kinds)
            tasks.append(Task((position,), ranks, position, start_s, start_s + 1.0, kind))
            free_s |= dict.fromkeys(ranks, start_s + 1.0)
        return Plan("many", "free-running", self.cluster, 0, tuple(samples), tuple(tasks), bound_s=1.0)


class Dawdling:
    """The model, on a rank that sleeps before every tenth of its tasks, for as long as a few of them take."""

    def __init__(self, model: Any, rank: int) -> None:
        self._model, self._random = model, random.Random(rank)

    def __call__(self, **inputs: Any) -> Any:
        if self._random.random() < 0.1:
            time.sleep(self._random.uniform(0.0, 0.04))
        return self._model(**inputs)


def many_tasks_on(world: Any, kind: str, lengths: Sequence[int]) -> tuple[float, dict[str, Any], int, int]:
    """One step; this rank's loss, all gradients, its tasks, the process groups that torch made."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    model: Any = tiny_model(layers=1)
    model = shard(model, kind, blocks=blocks_of(model))
    planner = ManyTasks(seed=5)
    dawdling = Dawdling(model, world.rank)
    with enable(model):
        loss, grads, _ = one_step(model, planner, lengths, dawdling)
    plan = ManyTasks(seed=5)([Sample(i, tokens) for i, tokens in enumerate(lengths)])
    assert len({task.ranks for task in plan.tasks}) == 15 or len(lengths) < 500
    return loss, grads, len(plan.tasks_of(world.rank)), dist.distributed_c10d._world.group_count


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tasks", [80, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_tasks_back_to_back_with_delays(kind: str, tasks: int) -> None:
    """D30, D36: groups over ranks that are no neighbours, random delays, a rank without a task.

    The gradients are those of one process, and no group has a communicator of its own.
    """
    lengths = [3 + 7 * index % 23 for index in range(tasks)]
    by_rank = run_ranks(many_tasks_on, 4, kind, lengths, deadline_s=120.0 + tasks)
    expected_loss, expected = reference("qwen3", layers=1, lengths=lengths)
    counts = [count for _, _, count, _ in by_rank]

    assert counts[1] == 0
    assert len({counts[rank] for rank in RANKS}) == 3
    assert min(counts[rank] for rank in RANKS) > 0.4 * tasks
    assert sum(loss for loss, *_ in by_rank) == pytest.approx(expected_loss, rel=1e-5)
    for _, grads, _, groups in by_rank:
        assert groups <= 3  # the world, one of all messages, one of plans and data
        assert grads.keys() == expected.keys()
        assert max(relative_error(grad, expected[name]) for name, grad in grads.items()) <= 1e-5
