"""Every family of models that the adapter takes: gradients of one process, and samples that do not meet."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.group_of_threads import gradients, one_pack
from tests.models import FAMILIES, VOCAB, ListDataset, reference_step, relative_error, tiny_model

from flexcp.core.plan import ExchangeKind
from flexcp.integrations.transformers import shape_of
from flexcp.integrations.transformers.hooks import checkpoint_layers

LENGTHS = [37, 5, 1, 29, 18]
EVERY = range(len(LENGTHS))
DATA = ListDataset(LENGTHS)
WAYS: list[tuple[int, ExchangeKind, int]] = [
    (1, "ring", 0),
    (2, "all-to-all", 0),
    (3, "ring", 0),
    (3, "gather", 6),
    (5, "ring", 0),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_one_process(family: str) -> None:
    """D10, D11, D46, D50, D58: windows, capped scores, sinks, balanced experts, latent attention.

    The reference computes attention by definition (`eager`), not by another kernel that may drop an option.
    """
    alone = tiny_model(family)
    alone.set_attn_implementation("eager")
    loss = reference_step(alone, DATA, EVERY)
    expected = gradients(alone)
    for degree, kind, whole_below in WAYS:
        stepped = one_pack(tiny_model(family), DATA, EVERY, degree, kind, whole_below)
        assert stepped.loss == pytest.approx(loss, rel=1e-5), (degree, kind)
        assert stepped.grads.keys() == expected.keys()
        for name, grad in stepped.grads.items():
            error = relative_error(grad, expected[name])
            assert error <= 1e-5, f"degree {degree}, {kind}, {name}: {error:.1e}"


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("mistral window", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}),
    ],
)
def test_the_options_of_the_tiny_models_matter(family: str, option: dict[str, Any]) -> None:
    """Without them the gradients are others, by far more than the tolerance: the test above could fail."""
    with_it = one_pack(tiny_model(family), DATA, EVERY, 2).grads
    kind, options = FAMILIES[family]
    changed = {**options, **option}
    FAMILIES["changed"] = (kind, changed)
    try:
        without = one_pack(tiny_model("changed"), DATA, EVERY, 2).grads
    finally:
        del FAMILIES["changed"]
    assert max(relative_error(without[name], grad) for name, grad in with_it.items()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_in_one_sample_leaves_the_next_as_it_was(family: str) -> None:
    """Bitwise, at every degree; the sample between two others, each made noise in turn."""
    lengths = [23, 31, 9]
    data = ListDataset(lengths)
    noisy = copy.deepcopy(data)
    generator = np.random.default_rng(99)
    for index in (0, 2):
        noisy[index]["input_ids"][:] = generator.integers(0, VOCAB, lengths[index])
    model = tiny_model(family)
    if hasattr(model.config, "num_experts_per_tok"):
        # The others multiply all rows of an expert at once, whose number differs: the last bit may, too.
        model.set_experts_implementation("batched_mm")
    for degree in (1, 2, 3, 4, 5):
        clean, noise = (one_pack(model, d, range(3), degree).logits for d in (data, noisy))
        assert torch.equal(clean[23:54], noise[23:54]), degree
        assert not torch.equal(clean[:23], noise[:23])
        assert not torch.equal(clean[54:], noise[54:])


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_give_the_same_gradients(family: str, use_reentrant: bool) -> None:
    """Both kinds recompute a layer, its messages included, before they run its backward."""
    plain = tiny_model(family)
    plain.config.output_router_logits = False  # which the reentrant kind cannot train
    model = copy.deepcopy(plain)
    checkpoint_layers(model, use_reentrant=use_reentrant)
    few = ListDataset([1, 5], unlabelled=())  # which leave a member of seven without rows
    cases: list[tuple[ListDataset, int, ExchangeKind]] = [
        (DATA, 3, "ring"),
        (DATA, 2, "all-to-all"),
        (few, 7, "gather"),
    ]
    for data, degree, kind in cases:
        expected = one_pack(plain, data, range(len(data)), degree, kind)
        stepped = one_pack(model, data, range(len(data)), degree, kind)

        assert [m.inputs["flexcp"].calls for m in stepped.micros] == [4] * degree  # twice a layer
        for name, grad in stepped.grads.items():
            assert torch.equal(grad, expected.grads[name]), name


def test_a_shape_counts_the_weights_of_the_model() -> None:
    """The planner's memory rests on it; latent attention is counted as if it were not compressed."""
    for family in FAMILIES:
        model = tiny_model(family)
        counted = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "bias" not in n)
        bound = 0.25 if family == "deepseek_v3" else 0.03
        assert shape_of(model.config).parameters == pytest.approx(counted, rel=bound), family
