"""No host waits for its device in a micro-batch: every operator that would ask it something is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.models import VOCAB, tiny_model
from tests.waits import Asked, first_wait

from flexcp.core.cluster import Cluster
from flexcp.core.plan import ExchangeKind, Plan, Task
from flexcp.core.sample import samples_from_lengths
from flexcp.integrations.transformers import enable
from flexcp.integrations.transformers.hooks import checkpoint_layers
from flexcp.profiler.alone import AloneTransport
from flexcp.runtime.batches import make_micro_batch
from flexcp.runtime.step import loss_sum_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ask", "operator"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.__setitem__(x > 0, torch.ones(2)), "index_put_"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_questions_are_seen_with_their_place(ask: Any, operator: str) -> None:
    said = first_wait(lambda: ask(torch.tensor([1.0, -1.0, 2.0])), CPU)
    assert said.startswith(f"aten.{operator}.")
    assert said.endswith("in <lambda> (test_waits.py)")


def test_arithmetic_and_places_in_an_index_are_no_questions() -> None:
    x, rows = torch.arange(4.0), torch.tensor([0, 2])
    with Asked() as asked:
        x[rows].index_add_(0, rows[:1], x[:1]).masked_fill_(x[:2] > 0, 0.0)
    assert asked.by == []


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("degree", "kind"), [(1, "ring"), (3, "ring"), (3, "gather"), (2, "all-to-all")])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_micro_batch_asks_its_device_nothing(
    family: str, degree: int, kind: ExchangeKind, checkpointing: bool
) -> None:
    """From the tables of its tiles to its gradients, where a model has no windows. The rank is alone."""
    model = tiny_model(family)
    if checkpointing:
        checkpoint_layers(model)
    samples = samples_from_lengths([50, 1, 31])
    task = Task((0, 1, 2), tuple(range(degree)), 0, 0.0, 1.0, kind)
    plan = Plan("test", "free-running", Cluster(degree, 100), 8, samples, (task,), 1.0)
    examples = {i: {"input_ids": np.arange(sample.tokens) % VOCAB} for i, sample in enumerate(samples)}
    transport: Any = AloneTransport()

    def work() -> None:
        micro = make_micro_batch(plan, task, examples, transport)
        loss_sum_of(model(**micro.inputs), micro).backward()

    with enable(model):
        assert first_wait(work, CPU) == ""
    assert all(parameter.grad is not None for parameter in model.parameters())
