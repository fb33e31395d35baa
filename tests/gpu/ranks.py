"""Several ranks that share one device: the whole gradient of a step against one process, and NCCL alone."""

from __future__ import annotations

from typing import Any

import torch

from flexcp.runtime.launch import launch
from tests.distributed.test_gradients import LENGTHS, RandomPlanner, one_step
from tests.gpu.common import Place, Row, judged
from tests.models import ListDataset, reference_step, relative_error, tiny_model

DEADLINE_S = 100.0
_BANDS = {torch.float32: 1e-5, torch.bfloat16: 6e-2}


def steps_here(world: Any, dtype: torch.dtype, seeds: list[int]) -> list[Any]:
    """One step for every seed, each seed another plan, on this rank's device."""
    from flexcp.integrations.transformers import enable

    torch.backends.cuda.matmul.allow_tf32 = False
    model: Any = tiny_model("qwen3", dtype).to(world.device)
    with enable(model):
        steps = [one_step(model, RandomPlanner(world.size, seed, 16)) for seed in seeds]
    return [(loss, {name: grad.cpu() for name, grad in grads.items()}) for loss, grads, _ in steps]


def check_ranks(place: Place) -> list[Row]:
    """Loss and every gradient, on every rank; then one rank by the backend of the device itself."""
    rows = []
    cases = [(torch.float32, 3, 1)] if place.quick else [(torch.float32, 4, 4), (torch.bfloat16, 3, 2)]
    for dtype, nproc, plans in cases:
        by_rank = launch(
            steps_here,
            nproc,
            (dtype, list(range(plans))),
            deadline_s=place.within(DEADLINE_S),
            share_devices=True,
        )
        error = _worst(by_rank, dtype, plans)
        rows.append(judged(f"gradients, {nproc} ranks, {plans} plans, {_name(dtype)}", error, _BANDS[dtype]))
    if not place.is_cpu:
        alone = launch(steps_here, 1, (torch.float32, [0]), deadline_s=place.within(DEADLINE_S))
        rows.append(judged("gradients, 1 rank, device's backend", _worst(alone, torch.float32, 1), 1e-5))
    return rows


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _worst(by_rank: list[Any], dtype: torch.dtype, plans: int) -> float:
    """Against fp32 on the CPU, sample by sample."""
    model = tiny_model("qwen3", dtype).float()
    expected_loss = reference_step(model, ListDataset(LENGTHS), range(len(LENGTHS)))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    errors = []
    for plan in range(plans):
        loss = sum(steps[plan][0] for steps in by_rank)
        errors.append(abs(loss - expected_loss) / expected_loss)
        for steps in by_rank:
            assert steps[plan][1].keys() == expected.keys()
            errors += [relative_error(grad.float(), expected[name]) for name, grad in steps[plan][1].items()]
    return max(float("inf") if error != error else error for error in errors)
