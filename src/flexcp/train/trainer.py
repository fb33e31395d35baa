"""The reference trainer: one rank of a run, from a config to a finished run folder.

Small on purpose: everything that is hard lives in the rooms below, and a reader can take this file as the
template of a trainer of their own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from flexcp.core.cluster import Cluster
from flexcp.core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FlexCPError,
    LossError,
    RankFailedError,
)
from flexcp.core.metrics import StepReport
from flexcp.core.run_folder import trace_path
from flexcp.core.trace import TraceWriter
from flexcp.cost.calibration import hardware_at
from flexcp.cost.model import cost_model
from flexcp.integrations.transformers import blocks_of, enable, shape_of
from flexcp.planner import Planner
from flexcp.runtime.agreement import require_agreement, versions
from flexcp.runtime.batches import MicroBatch
from flexcp.runtime.checkpoint import checkpoints, load_checkpoint, read_state, save_checkpoint
from flexcp.runtime.collectives import alike, ranks_of_a_node
from flexcp.runtime.engine import Engine
from flexcp.runtime.launch import World, num_cores
from flexcp.runtime.sharding import shard
from flexcp.runtime.signals import StopOnSignal
from flexcp.train.capacity import budget_tokens, capacity_tokens, ranks_left
from flexcp.train.config import OptimizerSection, TrainConfig, flattened
from flexcp.train.corpus import Corpus, Images, open_corpus
from flexcp.train.data.dataset import open_tokenizer
from flexcp.train.export import save_pretrained
from flexcp.train.images import model_images, price_of
from flexcp.train.model import build_model, compute_dtype, model_config
from flexcp.train.notices import notices
from flexcp.train.outputs import Outputs
from flexcp.train.resume import (
    BUDGET,
    apply_settings,
    changes,
    optimizer_settings,
    require_same_run,
    require_whole,
)
from flexcp.train.utilization import Utilization, peak_flops_per_s, slowest


@dataclass(frozen=True)
class RunSummary:
    """What is left of a run when it has ended; equal on all ranks, but for `plan_factors` of reports.

    Rank 0 alone learns costs.
    """

    reports: tuple[StepReport, ...]
    eval_losses: dict[int, float]
    folder: Path


def train(
    world: World, config: TrainConfig, resume: bool = False, quiet: bool = False, elastic: bool = False
) -> RunSummary:
    """Run one rank of a training run. All ranks call it with the same config.

    Args:
        world: this rank.
        config: the run.
        resume: continue from the newest checkpoint in the run folder.
        quiet: rank 0 draws no progress.
        elastic: continue if there is a checkpoint, else begin: what a run that is started again wants.

    SIGTERM ends the run after the step that is under way, on all ranks, with a checkpoint.

    Raises:
        FlexCPError: see `core.errors`; bad input is found before step 0.
    """
    run = config.run
    checkpoint, state, outputs = _open_run(world, config, resume, quiet, elastic)
    with outputs, contextlib.ExitStack() as to_the_end:
        capacity = partial(capacity_tokens, config, world, elastic, state.get("max_tokens"))
        corpus = open_corpus(config.data, capacity, run.seed, outputs.progress, _images(config))
        planner, model = _build(config, corpus, world)
        optimizer = _optimizer(model, config.optimizer)
        schedule = LambdaLR(optimizer, partial(learning_rate_factor, config.optimizer, run.steps))
        with alike("opening trackers and calibration"), outputs.in_a_sentence():
            outputs.describe(corpus, model, planner)
            for text in notices(config, corpus, world, ranks_left(world) if elastic else world.size):
                outputs.notice(text)
        with contextlib.ExitStack() as stack:
            stop = to_the_end.enter_context(StopOnSignal())  # who ends a run may say it twice
            stack.enter_context(enable(model))
            trace = stack.enter_context(TraceWriter(trace_path(run.folder, state["step"], world.rank)))
            engine = stack.enter_context(
                Engine(
                    model,
                    optimizer,
                    planner,
                    corpus.train,
                    global_batch=run.global_batch,
                    steps=run.steps,
                    seed=run.seed,
                    clip_norm=config.optimizer.clip_norm,
                    on_step_end=schedule.step,
                    on_notice=outputs.notice,
                    trace=trace,
                    timeout_s=run.timeout_s,
                    learn_costs=config.parallel.learn_costs,
                    on_bad_loss=run.on_bad_loss,
                    stop_asked=stop.asked,
                )
            )
            if corpus.evaluation is not None:
                engine.check(corpus.evaluation)
            utilization = _utilization(config, corpus, world, outputs.notice)
            max_tokens = config.data.max_tokens or capacity(corpus.vocab)
            loop = _Loop(config, corpus, model, optimizer, schedule, engine, outputs, utilization, max_tokens)
            if checkpoint:
                loop.resume(checkpoint, state)
            loop.run()
        if _saves_model(config) and not engine.stopped:
            save_pretrained(model, run.folder / "model", corpus.tokenizer, start=config.model.pretrained)
            outputs.notice(f"the model is in {run.folder / 'model'}, as transformers loads it")
        dist.barrier()  # all traces are closed
        with alike("writing down the run"), outputs.in_a_sentence():
            outputs.finish(loop.eval_losses)
        return RunSummary(tuple(loop.reports), loop.eval_losses, run.folder)


def _open_run(
    world: World, config: TrainConfig, resume: bool, quiet: bool, elastic: bool
) -> tuple[Path | None, dict[str, Any], Outputs]:
    """The checkpoint to go on from, what it says, and the run folder; all ranks see the same."""
    newest = checkpoints(config.run.folder / "checkpoints")[-1:]
    require_agreement(
        {**versions(), **flattened(config), "newest checkpoint": str(newest)},
        "Start all ranks with the same software, run file and --set, and run.folder on a shared disk.",
    )
    with alike("opening the run folder"):
        checkpoint = checkpoint_to_resume(config.run.folder, resume or (elastic and bool(newest)))
        state = _state_of(checkpoint)
        shown = world.rank == 0 and not quiet
        outputs = Outputs(config, state["step"], rank=world.rank, shown=shown, alone=not elastic)
    return checkpoint, state, outputs


class _Loop:
    """The loop, and what happens between its steps."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LambdaLR,
        engine: Engine,
        outputs: Outputs,
        utilization: Utilization,
        max_tokens: int,
    ) -> None:
        self.config, self.corpus, self.model, self.optimizer = config, corpus, model, optimizer
        self.schedule, self.engine, self.outputs = schedule, engine, outputs
        self.utilization, self.max_tokens = utilization, max_tokens
        self.reports: list[StepReport] = []
        self.eval_losses: dict[int, float] = {}
        self.forward = _forward(model, config)
        self._saved_step = -1

    def run(self) -> None:
        """Train to the last step; what was reached is saved also when data, loss or outputs end the run."""
        run = self.config.run
        try:
            for step in self.engine:
                for micro in step:
                    step.backward(self.forward(micro), micro)
                self._record(step.finish())
                done = step.index + 1
                if _due(done, run.eval_every, run.steps):
                    self._evaluate(done)
                if _due(done, run.checkpoint_every, run.steps):
                    self._save(done)
        except (DataError, LossError):
            # Raised by all ranks alike before any weight was touched: nothing that was learnt is lost.
            self._save(self.engine.next_step)
            raise
        if self.engine.stopped:
            done = self.engine.next_step
            self._save(done)
            self.outputs.notice(f"SIGTERM: ended after {done} of {run.steps} steps; --resume goes on")

    def _record(self, finished: StepReport) -> None:
        """Show a step and write it down."""
        report = slowest(finished)
        with self._writing_down(report.step + 1):
            report = self.utilization.measure(report)
            self.outputs.step(report, self.optimizer.param_groups[0]["lr"], self.engine.correction)
        self.reports.append(report)

    @contextlib.contextmanager
    def _writing_down(self, done: int) -> Iterator[None]:
        """What one rank cannot write, or refuses, ends all, with a checkpoint."""
        try:
            with alike("writing down a step"), self.outputs.in_a_sentence():
                yield
        except RankFailedError:
            raise  # nobody is there to save with
        except FlexCPError:
            self._save(done)
            raise

    def resume(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Continue from a checkpoint: weights and moments are its own, settings those of the config."""
        config = self.config
        now = self._identity(state["ranks"])
        require_same_run(checkpoint.name, state["made_with"], now, new_budget=config.run.new_budget)
        settings = optimizer_settings(self.optimizer)
        load_checkpoint(checkpoint, self.model, self.optimizer)
        self.engine.load_state_dict(state["engine"])
        self.schedule.last_epoch = state["schedule"]["last_epoch"]  # all else of it is of the config
        apply_settings(self.optimizer, self.schedule, settings)
        for text in changes(state, config):
            self.outputs.notice(text)
        self._saved_step = state["step"]

    def _identity(self, ranks: int) -> dict[str, str]:
        """What a resumed run must have in common with this one; the budget is that of so many ranks."""
        shape = shape_of(model_config(self.config.model, self.corpus.vocab, self.corpus.longest))
        return {**self.corpus.identity, BUDGET: str(budget_tokens(self.config, ranks, shape))}

    def _evaluate(self, done: int) -> None:
        if self.corpus.evaluation is None:
            return
        loss = self.engine.evaluate(self.corpus.evaluation, self.forward)
        self.eval_losses[done] = loss
        with self._writing_down(done):
            self.outputs.evaluation(done, loss)

    def _save(self, done: int) -> None:
        if done in (0, self._saved_step):
            return
        self._saved_step = done
        state = {
            "engine": self.engine.state_dict(),
            "schedule": {"last_epoch": self.schedule.last_epoch},
            "made_with": self._identity(self.engine.planner.cluster.ranks),
            "ranks": self.engine.planner.cluster.ranks,
            "max_tokens": self.max_tokens,
            "steps": self.config.run.steps,
            "optimizer": self.config.optimizer.model_dump(mode="json"),
        }
        folder = self.config.run.folder / "checkpoints"
        keep = self.config.run.keep_checkpoints
        self.outputs.saved(save_checkpoint(folder, done, self.model, self.optimizer, state, keep))


def _saves_model(config: TrainConfig) -> bool:
    wanted = config.run.save_model
    return config.model.pretrained is not None if wanted is None else wanted


def learning_rate_factor(section: OptimizerSection, steps: int, step: int) -> float:
    """Linear warm-up to 1, then cosine decay to `min_lr_ratio` at the last step.

    >>> [round(learning_rate_factor(OptimizerSection(warmup_steps=2), 4, s), 2) for s in range(4)]
    [0.5, 1.0, 1.0, 0.55]
    """
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    progress = min(1.0, (step - section.warmup_steps) / max(1, steps - section.warmup_steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr_ratio + (1.0 - section.min_lr_ratio) * cosine


def _images(config: TrainConfig) -> Images | None:
    """What the model makes of images, where the data has some."""
    if config.data.image_column is None:
        return None
    folder = config.model.pretrained or config.model.config
    if folder is None:
        raise ConfigError(
            "data.image_column is given, and neither model.pretrained nor model.config",
            "Name the folder of a vision-language model, or leave data.image_column out.",
        )
    if config.data.chat_column is not None:
        raise ConfigError(
            "data.image_column and data.chat_column are both given",
            "Images stand in plain text only: write the chat as text, with <image> in it.",
        )
    hf_config = model_config(config.model, 1, 1)
    checkpointing = config.run.gradient_checkpointing
    price = price_of(hf_config, hardware_at(config.parallel.hardware), checkpointing=checkpointing)
    named = config.data.tokenizer
    tokenizer = None if named.startswith("bpe:") else open_tokenizer(named)
    form = model_images(hf_config, folder, tokenizer, pretrained=config.model.pretrained is not None)
    return Images(form, price)


def _build(config: TrainConfig, corpus: Corpus, world: World) -> tuple[Planner, nn.Module]:
    parallel = config.parallel
    hf_config = model_config(config.model, corpus.vocab, corpus.longest)
    shape = shape_of(hf_config)
    checkpointing, speed = config.run.gradient_checkpointing, _speed(world)
    cost = cost_model(shape, hardware_at(parallel.hardware), checkpointing=checkpointing, speed=speed)
    per_node = parallel.ranks_per_node or ranks_of_a_node(world.local_size)
    cluster = Cluster(world.size, budget_tokens(config, world.size, shape), per_node)
    planner = Planner(cluster, cost, policy=parallel.policy, whole_below_tokens=parallel.whole_below_tokens)
    model = build_model(hf_config, config.run, world.device, config.model.pretrained)
    dtype = torch.bfloat16 if config.run.dtype == "bf16" else None
    return planner, shard(model, parallel.sharding, blocks=blocks_of(model), param_dtype=dtype)


def _speed(world: World) -> float:
    """Ranks on one CPU share its cores; an accelerator belongs to its rank alone."""
    return num_cores() / world.local_size if world.device.type == "cpu" else 1.0


def _utilization(
    config: TrainConfig, corpus: Corpus, world: World, notice: Callable[[str], object]
) -> Utilization:
    cpu = world.device.type == "cpu"
    shape = shape_of(model_config(config.model, corpus.vocab, corpus.longest))
    peak = peak_flops_per_s(config.parallel, cpu=cpu, speed=_speed(world))
    return Utilization(shape, peak, world.size, config.parallel.hardware, cpu=cpu, notice=notice)


def _optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) are not decayed."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas)


def _forward(model: nn.Module, config: TrainConfig) -> Callable[[MicroBatch], Any]:
    """Model call of one micro-batch; FSDP2 casts by itself, DDP computes bf16 under autocast."""
    cast = config.run.dtype == "bf16" and config.parallel.sharding == "ddp"
    dtype = compute_dtype(config.run)

    def forward(micro: MicroBatch) -> Any:
        device = micro.labels.device.type
        with torch.autocast(device, dtype) if cast else contextlib.nullcontext():
            return model(**micro.inputs)

    return forward


def _state_of(checkpoint: Path | None) -> dict[str, Any]:
    """Where a run begins, or goes on."""
    if checkpoint is None:
        return {"step": 0}
    state = read_state(checkpoint)
    require_whole(checkpoint.name, state)
    return state


def checkpoint_to_resume(folder: Path, resume: bool) -> Path | None:
    """The newest checkpoint; a run folder belongs to one run, and continuing it must be asked for."""
    found = checkpoints(folder / "checkpoints")
    if resume and not found:
        remedy = "Start without --resume, or name the folder of the run with --set run.folder=…"
        raise CheckpointError(f"{folder} holds no checkpoint", remedy)
    if found and not resume:
        raise ConfigError(
            f"{folder} already holds checkpoints (newest: {found[-1].name})",
            "Continue with --resume, or choose another folder with --set run.folder=…",
        )
    return found[-1] if resume else None


def _due(done: int, every: int, steps: int) -> bool:
    return done == steps or (every > 0 and done % every == 0)
