"""What the ranks of a run can hold, all of them or those that are left after a loss."""

from __future__ import annotations

from typing import Literal

from flexcp.core.model_shape import ModelShape
from flexcp.cost.calibration import hardware_at
from flexcp.cost.memory import tokens_per_rank
from flexcp.integrations.transformers import shape_of
from flexcp.runtime.launch import World
from flexcp.train.config import TrainConfig
from flexcp.train.model import model_config


def capacity_tokens(config: TrainConfig, world: World, elastic: bool, frozen: int | None, vocab: int) -> int:
    """The longest sample of a run, where the config names none: what all ranks together can hold.

    It stays that of the first start, or samples would come and go with ranks. A run that leaves long samples
    out and may lose ranks leaves out what the others could not hold.
    """
    if frozen is not None:
        return frozen
    ranks = ranks_left(world) if elastic and config.data.too_long == "skip" else world.size
    return ranks * budget_tokens(config, ranks, shape_of(model_config(config.model, vocab, 1)))


def ranks_left(world: World) -> int:
    """After a loss: of one rank, or under several nodes of one node."""
    lost = world.local_size if world.local_size < world.size else 1
    return max(1, world.size - lost)


def hopeless_notice(longest_tokens: int, rank_tokens: int, left: int) -> str:
    """What to know before a rank is lost; nothing if the others could go on."""
    if longest_tokens <= left * rank_tokens:
        return ""
    return (
        f"the longest sample has {longest_tokens:,} tokens; if ranks are lost, those left ({left}) hold "
        f"{left * rank_tokens:,}, and the run ends (data.max_tokens leaves such samples out)"
    )


def budget_tokens(config: TrainConfig, ranks: int, shape: ModelShape) -> int:
    """Tokens that one of `ranks` ranks holds: given, or derived from the memory of the hardware."""
    parallel = config.parallel
    sharding: Literal["ddp", "zero1"] = "ddp" if parallel.sharding == "ddp" else "zero1"
    return parallel.tokens_per_rank or tokens_per_rank(
        shape,
        hardware_at(parallel.hardware),
        ranks,
        sharding=sharding,
        checkpointing=config.run.gradient_checkpointing,
        margin=parallel.memory_margin,
    )
