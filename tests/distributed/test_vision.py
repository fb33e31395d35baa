"""Vision-language models under flexible groups: the gradient of a step is that of its samples run one by one.

One launch runs all cases, since starting ranks is what takes long.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from flexcp.core.cluster import Cluster
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from tests.distributed.test_gradients import RandomPlanner
from tests.harness import run_ranks
from tests.models import relative_error
from tests.vision_models import FAMILIES, MIXED, VisionDataset, tiny_vision_model, vision_reference

KINDS = ("ddp", "fsdp2")
RANKS, PLANS = 3, 4
CUT_IMAGE = [[3, ("image", 8, 8), 2]]  # most of it is one image, which all ranks hold rows of
MANY_FRAMES = [[2, ("video", 40, 1, 2), 5], [1, ("image", 2, 2), 30]]
TEXT = [[40], [7], [65]]
PAIR = [[6, ("image", 3, 5), 9, ("image", 2, 2), 7], [4, ("image", 4, 4), 20]]
LR, STEPS = 1e-3, 20


class Together:
    """All samples as one pack on the first `degree` ranks."""

    def __init__(self, degree: int) -> None:
        self.cluster, self.degree = Cluster(RANKS, 10**6), degree

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        task = Task(tuple(range(len(samples))), tuple(range(self.degree)), 0, 0.0, 1.0)
        return Plan("test", "lockstep", self.cluster, 0, tuple(samples), (task,), 1.0)


class ImagesOnOneRank:
    """Every sample alone, those with images (even numbers) on rank 0: the others never see one."""

    cluster = Cluster(RANKS, 10**6)

    def __call__(self, samples: Sequence[Sample]) -> Plan:
        ranks = [0 if sample.id % 2 == 0 else 1 + sample.id // 2 % 2 for sample in samples]
        tasks = [Task((i,), (rank,), i, float(i), i + 1.0) for i, rank in enumerate(ranks)]
        return Plan("test", "lockstep", self.cluster, 0, tuple(samples), tuple(tasks), 1.0)


_REFERENCES: dict[Any, Any] = {}
HALF_TEXT = [[3, ("image", 2, 3), 8], [20], [("image", 1, 2), 6], [13]]


def sharded(family: str, kind: str) -> Any:
    """A tiny model as the engine wants it."""
    from flexcp.integrations.transformers import blocks_of
    from flexcp.runtime.sharding import shard

    model: Any = tiny_vision_model(family)
    return model if kind == "plain" else shard(model, kind, blocks=blocks_of(model))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Full gradients by name; zero where there is none."""
    grads = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        grads[name.removeprefix("module.")] = full.clone()
    return grads


def freeze(model: Any) -> None:
    """All but the projector, as in the first stage of training."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("merger" in name or "projector" in name)


def some_steps(model: Any, planner: Any, dataset: Any, steps: int = 1) -> list[dict[str, Any]]:
    """Steps over all samples: this rank's share of the loss, every full gradient, what it encoded."""
    from flexcp.runtime.engine import Engine

    encoder = getattr(model, "module", model).model.get_submodule(
        "visual" if dataset.family == "qwen3_vl" else "vision_tower"
    )
    encoded: list[int] = []
    handle = encoder.register_forward_hook(
        lambda _, args, keywords, __: encoded.append(len(args[0] if args else keywords["pixel_values"])),
        with_kwargs=True,
    )
    results = []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    with Engine(model, optimizer, planner, dataset, global_batch=len(dataset), steps=steps) as engine:
        for step in engine:
            encoded.clear()
            for micro in step:
                step.backward(model(**micro.inputs), micro)
            step.reduce_gradients()
            result = {
                "loss": float(step.loss_sum) / step.supervised_tokens,
                "gradients": gradients(model),
                "degrees": set(step.plan.degrees),
                "encoded": sum(encoded),
            }
            results.append(result)
            step.finish()
    handle.remove()
    return results


def trained_weights(model: Any, planner: Any, dataset: Any) -> dict[str, torch.Tensor]:
    """Weights after many steps of plain gradient descent."""
    from flexcp.runtime.engine import Engine

    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with Engine(model, optimizer, planner, dataset, global_batch=len(dataset), steps=STEPS) as engine:
        for step in engine:
            for micro in step:
                step.backward(model(**micro.inputs), micro)
            step.finish()
    weights = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name.removeprefix("module.")] = full.detach().clone()
    return weights


def noise_passes_by(model: Any, family: str, degrees: Sequence[int]) -> list[tuple[bool, bool] | None]:
    """By degree: whether the logits of sample 1 stay bitwise, and those of sample 0 change, if sample 0
    becomes noise; None where this rank is outside of the group."""
    from flexcp.runtime.engine import Engine

    quiet, noisy = VisionDataset(family, PAIR), VisionDataset(family, PAIR)
    noisy.examples[0] = VisionDataset(family, PAIR, seed=1).examples[0]
    planner, results = Together(1), []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(micro: Any) -> Any:
        logits = model(**micro.inputs).logits
        rows = np.concatenate([np.full(piece.rows, piece.index) for piece in micro.pieces])
        seen.append((logits[0, rows == 0], logits[0, rows == 1]))
        return logits

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Engine(model, optimizer, planner, quiet, global_batch=2, steps=1) as engine:
        for planner.degree in degrees:
            seen.clear()
            engine.evaluate(quiet, forward)
            engine.evaluate(noisy, forward)
            if seen:
                (first, second), (noisy_first, noisy_second) = seen
                results.append((torch.equal(second, noisy_second), not torch.equal(first, noisy_first)))
            else:
                results.append(None)
    return results


def all_cases(world: Any) -> dict[Any, Any]:
    """Every family and way to hold parameters, on random plans; then the special cases."""
    from flexcp.integrations.transformers import enable

    results: dict[Any, Any] = {}
    for family, kind in product(FAMILIES, KINDS):
        model = sharded(family, kind)
        with enable(model):
            # Short samples stay whole under DDP, and everything is cut under FSDP2.
            planner = RandomPlanner(world.size, 5, whole_below_tokens=20 if kind == "ddp" else 0)
            results[family, kind, "plans"] = some_steps(model, planner, VisionDataset(family, MIXED), PLANS)
            results[family, kind, "text"] = some_steps(model, Together(2), VisionDataset(family, TEXT))
            results[family, kind, "weights"] = trained_weights(
                model, ImagesOnOneRank(), VisionDataset(family, HALF_TEXT)
            )
    for family in FAMILIES:
        model = sharded(family, "plain")
        with enable(model):
            for name, data in (("cut", CUT_IMAGE), ("frames", MANY_FRAMES)):
                results[family, name] = some_steps(model, Together(3), VisionDataset(family, data))
            results[family, "noise"] = noise_passes_by(model, family, (1, 2, 3))
            freeze(model)
            planner = RandomPlanner(world.size, 6, whole_below_tokens=20)
            results[family, "frozen"] = some_steps(model, planner, VisionDataset(family, MIXED), PLANS)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[Any, Any]]:
    """What `all_cases` returned, by rank."""
    return run_ranks(all_cases, RANKS, deadline_s=250.0)


def one_process(
    family: str, data: list[Any], frozen: bool = False
) -> tuple[VisionDataset, float, dict[str, torch.Tensor]]:
    """The data, and loss and gradients of their samples run one by one."""
    key = (family, str(data), frozen)
    if key not in _REFERENCES:
        model, dataset = tiny_vision_model(family), VisionDataset(family, data)
        if frozen:
            freeze(model)
        loss = vision_reference(model, dataset, range(len(dataset)))
        _REFERENCES[key] = dataset, loss, gradients(model)
    return _REFERENCES[key]


@cache
def trained_by_one_process(family: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights after the steps of `trained_weights`, and the names of those that moved."""
    model = tiny_vision_model(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    dataset = VisionDataset(family, HALF_TEXT)
    for _ in range(STEPS):
        vision_reference(model, dataset, range(len(dataset)))
        optimizer.step()
        optimizer.zero_grad()
    after = {name: p.detach() for name, p in model.named_parameters()}
    return after, [name for name in after if not torch.equal(after[name], before[name])]


def assert_as_one_process(
    by_rank: list[dict[str, Any]], family: str, data: list[Any], what: str, frozen: bool = False
) -> None:
    """Hold loss and every gradient, on every rank, to those of one process; no image was encoded twice."""
    dataset, loss, expected = one_process(family, data, frozen)
    # Softmax does not see a bias on keys: what is left of its gradient is rounding.
    floor = 1e-6 * max(float(grad.abs().max()) for grad in expected.values())
    assert sum(result["loss"] for result in by_rank) == pytest.approx(loss, rel=1e-5), what
    for rank, result in enumerate(by_rank):
        assert result["gradients"].keys() == expected.keys()
        for name, grad in result["gradients"].items():
            scale = max(float(expected[name].abs().max()), floor)
            error = float((grad - expected[name]).abs().max()) / scale
            assert error <= 1e-5 or (scale == floor and error <= 0.1), (
                f"{what}, rank {rank}, {name}: {error:.1e}"
            )
    pixels = [e[k] for e in dataset.examples for k in ("pixel_values", "pixel_values_videos") if k in e]
    assert sum(result["encoded"] for result in by_rank) == sum(map(len, pixels)), what


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_one_process(family: str, kind: str, results: list[dict[Any, Any]]) -> None:
    """D51, D52, D53: every gradient, the encoder's too, on random plans of mixed degrees."""
    for plan in range(PLANS):
        by_rank = [result[family, kind, "plans"][plan] for result in results]
        assert_as_one_process(by_rank, family, MIXED, f"{family}, {kind}, plan {plan}")
    degrees = set().union(*(result["degrees"] for result in results[0][family, kind, "plans"]))
    assert degrees == {1, 2, 3}


@pytest.mark.parametrize(("name", "data"), [("cut", CUT_IMAGE), ("frames", MANY_FRAMES)])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_ranks(family: str, name: str, data: Any, results: list[dict[Any, Any]]) -> None:
    """One image on three ranks, cut between them; and far more frames than ranks, shared evenly."""
    by_rank = [result[family, name][0] for result in results]
    assert_as_one_process(by_rank, family, data, f"{family}, {name}")
    encoded = sorted(result["encoded"] for result in by_rank)
    if name == "cut":
        assert encoded[:2] == [0, 0]
    else:
        assert encoded[0] >= 0.7 * encoded[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_and_ranks_without_images(family: str, kind: str, results: list[dict[Any, Any]]) -> None:
    """D34: a step of text alone, and twenty steps in which two of three ranks never see an image."""
    assert_as_one_process(
        [r[family, kind, "text"][0] for r in results], family, TEXT, f"{family}, {kind}, text"
    )

    expected, moved = trained_by_one_process(family)
    assert any("vis" in name for name in moved)  # the encoder is trained, too
    for name, weights in expected.items():
        for result in results:
            error = relative_error(result[family, kind, "weights"][name], weights)
            assert error <= 1e-5, f"{family}, {kind}, {name}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_stays_in_its_sample(family: str, results: list[dict[Any, Any]]) -> None:
    """Text and images of the first sample of a pack become noise; nothing of the second moves, to the bit."""
    for rank, result in enumerate(results):
        assert result[family, "noise"] == [(True, True) if rank < degree else None for degree in (1, 2, 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_projector_before_a_frozen_model(family: str, results: list[dict[Any, Any]]) -> None:
    """Ranks and packs without images have no gradient of their own, and still pass on those of others."""
    for plan in range(PLANS):
        by_rank = [result[family, "frozen"][plan] for result in results]
        assert_as_one_process(by_rank, family, MIXED, f"{family}, frozen, plan {plan}", frozen=True)
