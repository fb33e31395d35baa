"""Costs learnt while training: predictions come near what is measured, and a resumed run plans the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flexcp.core.cluster import Cluster
from flexcp.core.errors import CheckpointError, ConfigError
from flexcp.core.model_shape import ModelShape
from flexcp.core.plan import Plan
from flexcp.cost.correction import Correction
from flexcp.cost.model import cost_model
from flexcp.cost.presets import hardware
from flexcp.planner import Planner
from flexcp.runtime.learning import LAG, Learning
from tests.harness import run_ranks
from tests.models import ListDataset, tiny_model

SHAPE = ModelShape("tiny", 2, 32, 4, 2, 8, 48, 97)
LENGTHS = [37, 12, 61, 5, 9, 90, 23, 2, 44, 71, 3, 128, 17, 29, 8, 53, 31, 7, 100]
PLANNER = Planner(Cluster(2, 128), cost_model(SHAPE, hardware("cpu"), speed=100.0), whole_below_tokens=16)


def engine_on(dataset: Any, **options: Any) -> Any:
    from flexcp.runtime.engine import Engine
    from flexcp.runtime.sharding import shard

    model = shard(tiny_model(), "ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, optimizer, PLANNER, dataset, global_batch=8, learn_costs=True, **options)


def whole(learning: Learning) -> None:
    """From here on, what it is told of a step must be all of it."""
    learn = learning.learn

    def learn_all(step: int, plan: Plan, durations_s: Sequence[Sequence[float]]) -> None:
        known = [int(np.isfinite(durations).sum()) for durations in durations_s]
        assert known == [len(plan.tasks_of(rank)) for rank in range(plan.cluster.ranks)]
        learn(step, plan, durations_s)

    learning.learn = learn_all  # type: ignore[method-assign]


def run(engine: Any) -> tuple[list[str], list[float], list[dict[str, Any]]]:
    """Digests of the plans, predicted seconds per token, and what a checkpoint would hold, of each step."""
    from flexcp.integrations.transformers import enable

    digests, predicted, states = [], [], []
    if engine.rank == 0:
        whole(engine._learning)
    with enable(engine.model), engine:
        for step in engine:
            digests.append(step.plan.digest)
            for micro in step:
                step.backward(engine.model(**micro.inputs), micro)
            report = step.finish()
            predicted.append(report.predicted_s / report.tokens)
            assert bool(report.plan_factors) == (engine.rank == 0)
            if report.plan_factors:  # enough to make the plan again
                cost = Correction(report.plan_factors).apply(PLANNER.cost)
                assert replace(PLANNER, cost=cost)(step.plan.samples).digest == step.plan.digest
            states.append(engine.state_dict())
    return digests, predicted, states


def train_and_resume(world: Any) -> tuple[list[str], list[str], list[float], Correction | None]:
    """13 steps from a cost model a hundred times too fast; the last 3 again, from the state before them."""
    from flexcp.runtime.collectives import broadcast_text

    dataset = ListDataset(LENGTHS, unlabelled=())
    engine = engine_on(dataset, steps=10 + LAG)
    digests, predicted, states = run(engine)
    again = engine_on(dataset, steps=10 + LAG)
    again.load_state_dict(json.loads(broadcast_text(json.dumps(states[9]), 0, "the state")))
    return digests[10:], run(again)[0], predicted[:10], engine.correction


def test_predictions_are_repaired_and_a_resumed_run_plans_the_same() -> None:
    first, other = run_ranks(train_and_resume, 2, deadline_s=120)
    for once, again, predicted, _ in (first, other):
        assert len(once) == LAG
        assert once == again
        # A step may correct by half: one to be surprised, then up and up, in the plans three steps on.
        assert np.mean(predicted[-2:]) > 2 * np.mean(predicted[:LAG])
    assert first[:3] == other[:3]
    assert np.prod(first[3].factors) > 1.5**8
    assert other[3] is None  # it does not plan, so it learns nothing


def test_a_plan_knows_what_was_learnt_three_steps_before() -> None:
    learning = Learning(PLANNER)
    samples = [(37, 61, 90), (12, 44, 100), (128, 5, 71), (31, 53, 29)]
    from flexcp.core.sample import samples_from_lengths

    for step, lengths in enumerate(samples):
        plan = learning.planner(step)(samples_from_lengths(lengths))
        if step < LAG - 1:
            assert learning.planner(step + 1).cost == PLANNER.cost
        slow = [[1.3 * plan.tasks[k].duration_s for k in plan.tasks_of(rank)] for rank in range(2)]
        learning.learn(step, plan, slow)
    assert learning.planner(LAG - 1) == PLANNER
    assert learning.planner(LAG).cost != PLANNER.cost
    assert learning.planner(LAG).cost.token_s > 1.01 * PLANNER.cost.token_s
    assert learning.planner(LAG + 1).cost != learning.planner(LAG).cost

    kept = Learning(PLANNER)
    kept.load_state_dict(json.loads(json.dumps(learning.state_dict())), len(samples))
    for step in range(len(samples), len(samples) + LAG):
        assert kept.planner(step) == learning.planner(step)


def test_the_last_rank_to_come_knows_how_long_a_task_takes() -> None:
    from flexcp.core.sample import samples_from_lengths

    plan = PLANNER(samples_from_lengths([200]))
    assert plan.tasks[0].degree == 2
    early, late = 1.3 * plan.tasks[0].duration_s, plan.tasks[0].duration_s
    for durations_s in ([[early], [late]], [[late], [early]]):
        learning = Learning(PLANNER)
        learning.learn(0, plan, durations_s)
        assert learning.latest.factors == pytest.approx((1.0,) * 4, abs=1e-6)


def test_damage_and_other_planners_are_refused() -> None:
    from flexcp.runtime.engine import _learning

    with pytest.raises(CheckpointError, match="learnt costs"):
        Learning(PLANNER).load_state_dict({"3": {"schema": "x"}}, 4)
    with pytest.raises(CheckpointError, match="learnt costs"):
        Learning(PLANNER).load_state_dict({"x": Correction().to_json()}, 4)
    with pytest.raises(CheckpointError, match="of the steps"):
        Learning(PLANNER).load_state_dict({"99999": Correction().to_json()}, 4)
    with pytest.raises(ConfigError, match="cannot be learnt"):
        _learning(replace)  # type: ignore[arg-type]
