"""Several ranks that share one device: the whole gradient of a step against one process, and NCCL alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from flexcp.runtime.launch import launch
from tests.distributed.test_gradients import LENGTHS, RandomPlanner, one_step
from tests.gpu.common import Place, Row, attempt, judged
from tests.models import ListDataset, reference_step, relative_error, tiny_model

DEADLINE_S = 150.0  # four ranks import and connect first


def steps_here(world: Any, dtype: torch.dtype, seeds: list[int]) -> list[Any]:
    """One step for every seed, each seed another plan, on this rank's device."""
    from flexcp.integrations.transformers import enable

    torch.backends.cuda.matmul.allow_tf32 = False
    model: Any = tiny_model("qwen3", dtype).to(world.device)
    with enable(model):
        steps = [one_step(model, RandomPlanner(world.size, seed, 16)) for seed in seeds]
    return [(loss, {name: grad.cpu() for name, grad in grads.items()}) for loss, grads, _ in steps]


def check_ranks(place: Place) -> Iterator[Row]:
    """Loss and every gradient, on every rank; then one rank by the backend of the device itself."""
    cases = [(torch.float32, 3, 1)] if place.quick else [(torch.float32, 4, 4), (torch.bfloat16, 3, 2)]
    for dtype, nproc, plans in cases:
        name = f"gradients, {nproc} ranks, {plans} plans, {str(dtype).removeprefix('torch.')}"
        yield from attempt(name, partial(_row, name, place, dtype, nproc, plans, share_devices=True))
    if not place.is_cpu:
        name = "gradients, 1 rank, device's backend"
        yield from attempt(name, partial(_row, name, place, torch.float32, 1, 1, share_devices=False))


def _row(
    name: str, place: Place, dtype: torch.dtype, nproc: int, plans: int, *, share_devices: bool
) -> Iterator[Row]:
    by_rank = launch(
        steps_here,
        nproc,
        (dtype, list(range(plans))),
        deadline_s=place.within(DEADLINE_S),
        share_devices=share_devices,
    )
    yield judged(name, _worst(by_rank, dtype, plans), band(dtype))


def band(dtype: torch.dtype) -> float:
    """In a narrow dtype twice what one plain process is off by, as other sums round another way."""
    if dtype == torch.float32:
        return 1e-5
    narrow, (_, expected) = tiny_model("qwen3", dtype), _reference(dtype)
    reference_step(narrow, ListDataset(LENGTHS), range(len(LENGTHS)))
    return 2 * max(
        relative_error(parameter.grad.float(), expected[name])
        for name, parameter in narrow.named_parameters()
    )


def _reference(dtype: torch.dtype) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of these weights in fp32 on the CPU, sample by sample."""
    model = tiny_model("qwen3", dtype).float()
    loss = reference_step(model, ListDataset(LENGTHS), range(len(LENGTHS)))
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def _worst(by_rank: list[Any], dtype: torch.dtype, plans: int) -> float:
    expected_loss, expected = _reference(dtype)
    errors = []
    for plan in range(plans):
        loss = sum(steps[plan][0] for steps in by_rank)
        errors.append(abs(loss - expected_loss) / expected_loss)
        for steps in by_rank:
            assert steps[plan][1].keys() == expected.keys()
            errors += [relative_error(grad.float(), expected[name]) for name, grad in steps[plan][1].items()]
    return max(float("inf") if error != error else error for error in errors)
