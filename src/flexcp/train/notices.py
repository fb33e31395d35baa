"""What a user should know of a run before step 0 and what stops nothing, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flexcp.core.model_shape import ModelShape
from flexcp.cost.calibration import is_calibration, read_calibration
from flexcp.cost.doubts import doubts
from flexcp.integrations.transformers import shape_of
from flexcp.integrations.transformers.config import text_config
from flexcp.profiler.measure import device_name
from flexcp.runtime.launch import World, num_cores
from flexcp.train.capacity import budget_tokens, hopeless_notice
from flexcp.train.config import TrainConfig
from flexcp.train.corpus import Corpus
from flexcp.train.model import model_config


def notices(config: TrainConfig, corpus: Corpus, world: World, left: int) -> Iterator[str]:
    """Of the machine, calibration, lengths and settings; `left` ranks are to go on if some are lost.

    Raises:
        ConfigError: the calibration is of another device.
    """
    hf_config = model_config(config.model, corpus.vocab, corpus.longest)
    shape = shape_of(hf_config)
    if world.device.type == "cpu" and world.local_size > num_cores():
        yield (
            f"{world.local_size} ranks share {num_cores()} cores: they take turns, so times vary from step "
            "to step, and with them what is learnt of the costs"
        )
    yield from _calibration_notices(config, shape, corpus.longest, world)
    if hopeless := hopeless_notice(corpus.longest, budget_tokens(config, left, shape), left):
        yield hopeless
    positions = getattr(text_config(hf_config), "max_position_embeddings", None)
    if positions is not None and corpus.longest > positions:
        yield (
            f"the longest sample has {corpus.longest:,} tokens, the model was made for {positions:,} "
            "(max_position_embeddings); data.max_tokens leaves such samples out"
        )
    warmup, steps = config.optimizer.warmup_steps, config.run.steps
    if warmup >= steps:
        yield (
            f"optimizer.warmup_steps is {warmup} and run.steps {steps}: the learning rate rises to the end "
            "and never falls"
        )


def _calibration_notices(
    config: TrainConfig, shape: ModelShape, longest: int, world: World
) -> tuple[str, ...]:
    """What to know of the calibration in use; refuses that of another device."""
    name = config.parallel.hardware
    if not is_calibration(name):
        return ()
    calibration = read_calibration(Path(name))
    calibration.require_device(device_name(world.device))
    crosses = world.size > (config.parallel.ranks_per_node or world.local_size)
    checkpointing = config.run.gradient_checkpointing
    return doubts(calibration, shape, longest, world.size, checkpointing=checkpointing, crosses_nodes=crosses)
