"""The engine across ranks: same losses whatever the plan, nothing built after start, evaluation, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, DataError, DisagreementError, SampleTooLongError, UnsupportedError
from flexcp.core.model_shape import ModelShape
from flexcp.cost.model import cost_model
from flexcp.cost.presets import hardware
from flexcp.planner import Planner
from tests.harness import run_ranks
from tests.models import VOCAB, ListDataset, reference_step, tiny_model

SHAPE = ModelShape("tiny", 2, 32, 4, 2, 8, 48, 97)
LENGTHS = [37, 12, 61, 5, 1, 90, 23, 2, 44, 71, 3, 128, 17, 29, 8, 53, 31, 7, 100]


def make_planner(ranks: int, policy: str = "flexcp", tokens_per_rank: int = 48) -> Planner:
    """A planner under which the long ones of `LENGTHS` need 2 and 3 ranks."""
    cost = cost_model(SHAPE, hardware("cpu"))
    return Planner(Cluster(ranks, tokens_per_rank), cost, policy=policy, whole_below_tokens=16)


def make_engine(model: Any, planner: Any, dataset: Any, **options: Any) -> Any:
    from flexcp.runtime.engine import Engine

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, optimizer, planner, dataset, **options)


def losses_of(engine: Any, met: set[str] | None = None) -> list[float]:
    """Run to the end; the loss of every step, and into `met` how groups met."""
    reports = []
    for step in engine:
        if met is not None:
            met.update(step.plan.exchanges)
        for micro in step:
            step.backward(engine.model(**micro.inputs), micro)
        reports.append(step.finish())
    engine.close()
    return [report.loss for report in reports]


def train_with_policies(
    world: Any, policies: Sequence[str], steps: int, tokens_per_rank: int
) -> dict[str, tuple[list[float], set[str]]]:
    """Losses, and the exchanges of groups of several ranks, by policy."""
    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    losses = {}
    for policy in policies:
        model = tiny_model()
        model = shard(model, "fsdp2", blocks=blocks_of(model))
        with enable(model):
            planner = make_planner(world.size, policy, tokens_per_rank)
            engine = make_engine(model, planner, ListDataset(LENGTHS), global_batch=7, steps=steps)
            met: set[str] = set()
            losses[policy] = losses_of(engine, met), met
    return losses


def train_alone(steps: int) -> list[float]:
    """Plain PyTorch, one process, sample by sample."""
    from flexcp.runtime.order import batch_indices

    model, dataset = tiny_model(), ListDataset(LENGTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        losses.append(reference_step(model, dataset, batch_indices(len(dataset), 7, 0, step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_policies_train_alike() -> None:
    """20 steps of SGD in fp32: static, paper and flexcp lose the same as one process without FlexCP."""
    losses, _ = losses_by_policy(["static", "paper", "flexcp"], 3, tokens_per_rank=48, steps=20)
    alone = train_alone(20)

    assert alone[-1] < alone[0]
    assert losses == dict.fromkeys(losses, pytest.approx(alone, rel=1e-5))


def test_policies_that_exchange_heads_train_alike() -> None:
    """`ulysses` and `flexsp` run for real: every group of two and four ranks swaps rows for heads."""
    losses, met = losses_by_policy(["ulysses", "flexsp"], 4, tokens_per_rank=64, steps=8)

    assert losses == dict.fromkeys(losses, pytest.approx(train_alone(8), rel=1e-5))
    assert met == {"ulysses": {"all-to-all"}, "flexsp": {"all-to-all"}}


def losses_by_policy(
    policies: list[str], nproc: int, tokens_per_rank: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, set[str]]]:
    """Losses, the same on all ranks, and the exchanges of groups, of every policy."""
    first, *others = run_ranks(train_with_policies, nproc, policies, steps, tokens_per_rank)
    losses, met = ({policy: first[policy][part] for policy in policies} for part in (0, 1))
    assert [{policy: found[policy][0] for policy in policies} for found in others] == [losses] * (nproc - 1)
    return losses, met


def evaluate_and_count(world: Any) -> dict[str, Any]:
    """Evaluation by the training path, odd sample counts, and the number of communicators."""
    from torch.distributed.tensor import DTensor

    from flexcp.integrations.transformers import blocks_of, enable
    from flexcp.runtime.sharding import shard

    found: dict[str, Any] = {"eval": [], "counts": [], "training": [], "in shards": []}
    model = tiny_model()
    model = shard(model, "fsdp2", blocks=blocks_of(model))

    def forward(micro: Any) -> Any:
        found["training"].append(model.training)
        return model(**micro.inputs)

    with enable(model):
        engine = make_engine(model, make_planner(world.size), ListDataset(LENGTHS), global_batch=5, steps=3)
        found["groups at start"] = dist.distributed_c10d._world.group_count  # what torch itself counts
        for lengths in ([40], [30, 60, 9], LENGTHS):  # D55: 60 and more tokens need two ranks
            found["eval"].append(engine.evaluate(ListDataset(lengths, unlabelled=()), forward))
            found["in shards"].append(all(isinstance(p, DTensor) for p in model.parameters()))
        found["training"].append(model.training)
        losses_of(engine)
        found["groups at end"] = dist.distributed_c10d._world.group_count
        for samples, batch in ((1, 1), (1, 4), (7, 5), (world.size - 1, world.size - 1)):
            few = ListDataset(LENGTHS[:samples], unlabelled=())
            small = make_engine(model, make_planner(world.size), few, global_batch=batch, steps=2)
            found["counts"].append(losses_of(small))
    return found


def test_evaluation_small_batches_and_communicators() -> None:
    """D26, D30, D35, D36, D37, D55, D56, D57: no communicator is made after start, whatever the batch."""
    by_rank = run_ranks(evaluate_and_count, 3)
    model = tiny_model()
    datasets = [ListDataset(lengths, unlabelled=()) for lengths in ([40], [30, 60, 9], LENGTHS)]
    expected = [reference_step(model, dataset, range(len(dataset))) for dataset in datasets]

    for found in by_rank:
        assert found["eval"] == pytest.approx(expected, rel=1e-5)
        *evaluating, behind = found["training"]
        assert found["in shards"] == [True] * 3  # what was gathered is let go
        assert set(evaluating) == {False}
        assert behind
        assert np.isfinite(found["counts"]).all()
        assert found["groups at end"] == found["groups at start"] == by_rank[0]["groups at start"]
        assert found["groups at start"] <= 3  # the world, one parent of all rings, one of plans and data


class Foreign(ListDataset):
    """Its second sample ends with a token that the model does not know."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = dict(super().__getitem__(index))
        return {**example, "input_ids": [*example["input_ids"][:-1], VOCAB]} if index == 1 else example


def provoke(world: Any) -> dict[str, str]:
    """Every refusal that must reach all ranks alike, and the text it comes with."""
    from flexcp.integrations.transformers import enable

    texts: dict[str, str] = {}

    def expect(name: str, kind: type[Exception], engine: Any) -> None:
        try:
            losses_of(engine())
            texts[name] = "nothing was raised"
        except kind as error:
            texts[name] = str(error)

    model = tiny_model()
    data = ListDataset([10, 20, 30])
    planner = make_planner(world.size)

    def build(dataset: Any = data, planner: Any = planner, model: Any = model, **options: Any) -> Any:
        return lambda: make_engine(model, planner, dataset, **{"global_batch": 3, "steps": 1, **options})

    with enable(model):
        expect("too long", SampleTooLongError, build(ListDataset([10, 97])))
        expect("no labels", DataError, build(ListDataset([10, 20], unlabelled=(0, 1))))
        expect("empty", DataError, build(ListDataset([])))
        expect("no data set", DataError, build([1, 2]))
        expect("ranks", ConfigError, build(planner=make_planner(world.size + 1)))
        expect("batch", ConfigError, build(global_batch=0))
        lying = ListDataset([10, 20])
        lying.lengths = np.array([10, 21])
        expect("changed", DataError, build(lying))
        expect("foreign", DataError, build(Foreign([10, 20, 30])))
        wrapped = torch.nn.parallel.DistributedDataParallel(tiny_model())
        expect("buffers", ConfigError, build(model=wrapped))
        expect("plans", DisagreementError, lambda: _tampered(build()()))
    expect("not enabled", UnsupportedError, build(model=tiny_model()))
    return texts


def _tampered(engine: Any) -> Any:
    """An engine whose rank 1 receives another plan than the rest."""
    from dataclasses import replace

    hand_out = engine._feed.hand_out

    def hand_out_another(made: Any) -> Any:
        plan = hand_out(made)
        other = plan.text.replace('"policy":"flexcp"', '"policy":"another"')
        return replace(plan, text=other) if engine.rank == 1 else plan

    engine._feed.hand_out = hand_out_another
    return engine


def test_bad_input_ends_all_ranks_with_one_sentence() -> None:
    """D28, D48, D49 and the bad inputs of a step; every rank says the same, and none hangs."""
    first, second = run_ranks(provoke, 2)
    apart = {"plans"}  # each rank names the others

    assert {k: v for k, v in first.items() if k not in apart} == {
        k: v for k, v in second.items() if k not in apart
    }
    assert "sample 1 has 97 tokens" in first["too long"]
    assert "It fits on 3 ranks" in first["too long"]
    assert "none of the 3 samples of step 0 has a supervised token" in first["no labels"]
    assert "the data set is empty" in first["empty"]
    assert "a list has no lengths" in first["no data set"]
    assert "plans for 3 ranks, the world has 2" in first["ranks"]
    assert "global_batch is 0" in first["batch"]
    assert "sample 1 has 20 tokens, its length was 21" in first["changed"]
    assert f"token {VOCAB} occurs in sample" in first["foreign"]
    assert f"the model knows {VOCAB} tokens" in second["foreign"]
    assert "broadcasts buffers" in first["buffers"]
    assert "rank 0 and ranks [1] hold different plans" in first["plans"]
    assert "rank 1 and ranks [0] hold different plans" in second["plans"]
    assert "ran without FlexCP attention" in first["not enabled"]


def tasks_read_late(world: Any) -> list[Any]:
    """A clock whose marks mean nothing until the gradient norm is known, as on an accelerator."""
    from flexcp.integrations.transformers import enable
    from flexcp.runtime import step as step_module

    class LateClock:
        is_immediate = False
        ready = False
        marked = 0

        def __init__(self, device: torch.device) -> None:
            LateClock.marked = 0

        def mark(self) -> int:
            LateClock.marked += 1
            return LateClock.marked

        def read_s(self, mark: int) -> float:
            assert LateClock.ready, "the host would wait for the device"
            return 100.0 + mark

    clip = step_module.clip_gradients

    def clip_and_know(*args: Any) -> float:
        norm = clip(*args)
        LateClock.ready = True
        return norm

    step_module.Clock, step_module.clip_gradients = LateClock, clip_and_know
    model = tiny_model()
    with enable(model):
        planner = make_planner(world.size, tokens_per_rank=64)
        engine = make_engine(model, planner, ListDataset(LENGTHS), global_batch=9, steps=2)
        found = []
        for step in engine:
            LateClock.ready = False
            for micro in step:
                step.backward(engine.model(**micro.inputs), micro)
            step.finish()
            found.append((len(step.plan.tasks_of(world.rank)), list(step._durations_s), step._work_ended_s))
        engine.close()
    return found


def test_times_of_tasks_are_read_when_the_device_is_done() -> None:
    """Each task is from its own mark to the next; nothing is read before the step is summed."""
    for steps in run_ranks(tasks_read_late, 2):
        for tasks, durations_s, ended_s in steps:
            assert durations_s == [1.0] * tasks
            assert ended_s == 101.0 + 1 + 2 * tasks


def train_with_dropout(world: Any, steps: int, first: int) -> tuple[list[float], list[float]]:
    """Losses from step `first` on, with weights that stay as they are, and the draw after each step."""
    from flexcp.integrations.transformers import enable
    from flexcp.runtime.engine import Engine

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    losses, draws = [], []
    torch.manual_seed(first)  # what came before must not matter
    with (
        enable(model),
        Engine(
            model,
            optimizer,
            make_planner(world.size, tokens_per_rank=96),
            ListDataset(LENGTHS),
            global_batch=4,
            steps=steps,
        ) as engine,
    ):
        engine.load_state_dict({**engine.state_dict(), "step": first})
        for step in engine:
            draws.append(float(torch.rand(())))
            for micro in step:
                step.backward(torch.nn.functional.dropout(model(**micro.inputs).logits, 0.3), micro)
            losses.append(step.finish().loss)
    return losses, draws


def begin_and_go_on(world: Any) -> list[tuple[list[float], list[float]]]:
    return [train_with_dropout(world, 4, first) for first in (0, 2)]


def test_random_numbers_of_a_step_are_those_of_the_unbroken_run() -> None:
    """Dropout after a resume is that of the unbroken run; every rank and every step draws its own."""
    by_rank = run_ranks(begin_and_go_on, 2)

    for (losses, draws), (losses_after, draws_after) in by_rank:
        assert losses_after == losses[2:]
        assert draws_after == draws[2:]
    assert len({draw for unbroken, _ in by_rank for draw in unbroken[1]}) == 8
