"""Continuing a run: what must be the same, and what follows the configuration of today."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from torch.optim.lr_scheduler import LambdaLR

from flexcp.core.errors import CheckpointError
from flexcp.train.config import TrainConfig

BUDGET = "parallel.tokens_per_rank"


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Engine(_Part):
    step: NonNegativeInt
    skipped_steps: NonNegativeInt
    learnt_costs: dict[str, Any]


class _Schedule(_Part):
    last_epoch: NonNegativeInt


class _State(_Part):
    """What a run reads of the JSON part of a checkpoint."""

    step: NonNegativeInt
    steps: PositiveInt
    ranks: PositiveInt
    max_tokens: PositiveInt
    engine: _Engine
    schedule: _Schedule
    made_with: dict[str, str]
    optimizer: dict[str, Any]


def require_whole(name: str, state: Mapping[str, Any]) -> None:
    """Refuse the JSON part of a checkpoint that does not hold what a run reads of it.

    All of it is looked at here, before anything is loaded; a user's own loop has the checks of
    `Engine.load_state_dict`.

    Raises:
        CheckpointError: something is missing or of another type; it is named.
    """
    try:
        step = _State.model_validate(state).engine.step
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    else:
        if step == state["step"]:
            return
        what = f"engine.step is {step} and step {state['step']}"
    raise CheckpointError(
        f"{name} is damaged: its flexcp.json does not say what a run needs ({what})",
        "Remove this checkpoint to resume from an older one.",
    )


def require_same_run(
    name: str, made_with: Mapping[str, str], now: Mapping[str, str], *, new_budget: bool
) -> None:
    """Refuse a checkpoint of other data, tokenizer, held-out samples or budget.

    Raises:
        CheckpointError: something differs; it is named with both values.
    """
    for what, value in now.items():
        old = made_with.get(what)
        if old != value and not (what == BUDGET and new_budget):
            raise CheckpointError(
                f"{name} was made with another {what}: {old}; this run has {value}",
                "Resume with the same (unset, it follows from hardware, margin, sharding and checkpointing), "
                "or say run.new_budget = true: the samples stay, the plans differ."
                if what == BUDGET
                else "Resume with the same, or start a new run in another folder.",
            )


def optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of every group of parameters: learning rate, decay, and whatever else was given."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def apply_settings(
    optimizer: torch.optim.Optimizer, schedule: LambdaLR, settings: list[dict[str, Any]]
) -> None:
    """Settings in place of those that a checkpoint brought along, at the place of the schedule that it was.

    With the same settings nothing changes, to the bit.
    """
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    schedule.base_lrs = [own["initial_lr"] for own in settings]
    for group, base, factor in zip(
        optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(schedule.last_epoch)


def changes(state: Mapping[str, Any], config: TrainConfig) -> Iterator[str]:
    """What the user should know of a run that goes on otherwise than it began."""
    for name, value in config.optimizer.model_dump(mode="json").items():
        if (old := state["optimizer"].get(name, value)) != value:
            yield f"optimizer.{name} was {old} and is {value} from step {state['step']} on"
    steps = config.run.steps
    if state["steps"] != steps:
        yield (
            f"the run was planned for {state['steps']} steps and now for {steps}: "
            "the learning rate follows the new length from here on"
        )
    if state["step"] >= steps:
        yield f"all {steps} steps are done; raise run.steps to go on"
