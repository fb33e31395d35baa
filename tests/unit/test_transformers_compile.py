"""What surrounds attention may be compiled, checkpointed and run in bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.group_of_threads import one_pack
from tests.models import FAMILIES, VOCAB, ListDataset, relative_error, tiny_model
from tests.reference import ThreadExchange, ThreadGroup

from flexcp.core.layout import make_layout
from flexcp.core.sample import samples_from_lengths
from flexcp.integrations.transformers import enable
from flexcp.runtime.batches import TaskContext

# Rounding sends some of their tokens to other experts: nothing to compare then.
ROUTED = {"qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"}


def inputs_of(lengths: list[int], generator: np.random.Generator) -> dict[str, Any]:
    """A pack on one rank."""
    layout = make_layout(samples_from_lengths(lengths), 1, 0)
    exchange: Any = ThreadExchange(ThreadGroup(1), 0)
    return {
        "input_ids": torch.from_numpy(generator.integers(0, VOCAB, (1, sum(lengths)))),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "flexcp": TaskContext(layout, exchange, 0),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it traces
@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_compilations_stay_flat_over_batches(family: str) -> None:
    """D38: two hundred packs of other lengths and numbers of samples; all graphs are made by the third.

    (A rank that holds a single row gets graphs of its own, once: torch takes a size of 1 for a constant.)
    """
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    model = tiny_model(family)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=counting, dynamic=True)
    generator = np.random.default_rng(4)
    after_three = 0
    with enable(compiled), enable(eager):
        for batch in range(200):
            inputs = inputs_of(generator.integers(1, 30, generator.integers(2, 6)).tolist(), generator)
            logits = compiled(**inputs).logits
            if batch < 5:
                assert relative_error(logits.detach(), eager(**inputs).logits.detach()) <= 1e-5
                logits.square().mean().backward()
            if batch == 2:
                after_three = graphs
    assert after_three > 2  # the layers are graphs, between breaks at attention
    assert graphs == after_three


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ROUTED))
def test_bf16_autocast_stays_near_fp32(family: str) -> None:
    """Scores are of lowered q and k, sums in fp32: degree 3 is hardly further from fp32 than degree 1."""
    data = ListDataset([37, 5, 29, 18])
    model = tiny_model(family)
    exact = one_pack(model, data, range(4), 1)
    errors = {}
    for degree in (1, 3):
        stepped = one_pack(model, data, range(4), degree, autocast=True)
        assert stepped.loss == pytest.approx(exact.loss, rel=5e-3)
        errors[degree] = max(relative_error(grad, exact.grads[name]) for name, grad in stepped.grads.items())
    assert 1e-4 < errors[1] < 0.15
    assert errors[3] < 2 * errors[1] + 0.01
