"""Profiles the model of a run: builds it as the trainer does, without data, and measures its tasks."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flexcp.core.errors import ConfigError
from flexcp.cost.profiled import Profiled
from flexcp.integrations.transformers import enable, shape_of
from flexcp.profiler.measure import Bench
from flexcp.profiler.session import Subject, profile
from flexcp.runtime.launch import World
from flexcp.train.config import DataSection, TrainConfig
from flexcp.train.data.dataset import open_tokenizer
from flexcp.train.model import build_model, compute_dtype, model_config


def profile_rank(
    world: World, config: TrainConfig, longest_tokens: int, budget_s: float, shown: bool
) -> Profiled | None:
    """Measure on one rank; all ranks call it with the same arguments, and rank 0 gets the answer.

    Args:
        world: this rank.
        config: the run whose model, dtype and checkpointing are profiled.
        longest_tokens: no sample is longer.
        budget_s: seconds to spend.
        shown: whether rank 0 draws progress.

    Raises:
        FlexCPError: see `profiler.session.profile` and `train.model.model_config`.
    """
    hf_config = model_config(config.model, vocab_of(config.data), longest_tokens)
    model = build_model(hf_config, config.run, world.device)
    dtype = compute_dtype(config.run)
    cast = dtype if config.run.dtype == "bf16" else None
    subject = Subject(shape_of(hf_config), config.run.gradient_checkpointing, torch.finfo(dtype).bits // 8)
    bar = Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not (shown and world.rank == 0),
        transient=True,
    )
    with bar, enable(model):
        line = bar.add_task("links", total=1.0)
        found = profile(
            world,
            Bench(model, hf_config.vocab_size, world, cast),
            subject,
            longest_tokens=longest_tokens,
            budget_s=budget_s,
            progress=lambda what, share: bar.update(line, description=what, completed=share),
        )
    return found if world.rank == 0 else None


def vocab_of(data: DataSection) -> int:
    """Size of the vocabulary that a run on these data would have.

    Raises:
        ConfigError: `bpe:` without a size.
        DataError: the tokenizer cannot be opened.
    """
    kind, separator, size = data.tokenizer.partition(":")
    if kind == "bpe" and separator:
        if not size.isdecimal():
            raise ConfigError(
                f"data.tokenizer {data.tokenizer!r} has no vocabulary size", "For example bpe:4096"
            )
        return int(size)
    return open_tokenizer(data.tokenizer).vocab_size
