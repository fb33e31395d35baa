"""Any causal-language-model trainer of Hugging Face on flexible groups: `flexible(SFTTrainer)(…)`.

The trainer keeps its arguments, optimizer, schedule, callbacks, logs, checkpoints and resumption. Its data
loader only counts steps: the step itself (all micro-batches of this rank, one gradient reduction) is the
engine's. Public methods are overridden and nothing else.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import DataLoader

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, UnsupportedError
from flexcp.core.metrics import StepReport
from flexcp.cost.calibration import hardware_at
from flexcp.cost.memory import tokens_per_rank
from flexcp.cost.model import cost_model
from flexcp.integrations.transformers.config import check_supported, shape_of, text_config
from flexcp.integrations.transformers.hooks import enable, inner_model, is_enabled
from flexcp.integrations.transformers.resuming import KeepsState, resume
from flexcp.integrations.transformers.rows import RowSamples
from flexcp.planner import Planner
from flexcp.runtime.batches import MicroBatch
from flexcp.runtime.collectives import ranks_of_a_node
from flexcp.runtime.engine import Engine
from flexcp.runtime.launch import local_size
from flexcp.runtime.step import Step


@dataclass(frozen=True, kw_only=True)
class Groups:
    """How a trainer's steps are spread over its ranks; see `flexible`.

    Attributes:
        tokens_per_rank: tokens that a rank holds at once; None counts them from the memory of `hardware`.
        hardware: a preset of `flexcp.hardware`, or the .json of `flexcp profile`; needed except on CPU.
        policy: how steps are planned.
        ranks_per_node: ranks of a machine; None for as many as the launcher started on this one.
        whole_below_tokens: shorter samples are never cut; None for the planner's own choice.
        learn_costs: correct the costs by measured times; plans then depend on the clock.
        timeout_s: a rank that is silent for longer ends the run.
    """

    tokens_per_rank: int | None = None
    hardware: str | None = None
    policy: str = "flexcp"
    ranks_per_node: int | None = None
    whole_below_tokens: int | None = None
    learn_costs: bool = False
    timeout_s: float = 600.0


# Arguments that change what is computed in a way that groups do not have, each with the value that is off.
_REFUSED_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "Use bf16: gradients are summed over ranks before they could be unscaled."),
    "label_smoothing_factor": ((0, 0.0), "Leave it out: the loss is the cross entropy of the targets."),
    "neftune_noise_alpha": ((None,), "Leave it out: its noise depends on the rows that a rank holds."),
    "loss_type": (("nll", "chunked_nll"), 'Set loss_type to "nll".'),
    "deepspeed": ((None,), "Use DDP, or FSDP of version 2."),
    "auto_find_batch_size": (
        (False,),
        "Say how many tokens a rank holds instead: Groups(tokens_per_rank=…).",
    ),
    "group_by_length": ((False,), "Leave it out: packs have no padding that it could save."),  # of 5.0
    "train_sampling_strategy": (("random",), "Leave it out: samples come in an order of FlexCP's own."),
    "dataloader_drop_last": ((False,), "Leave it out: the last step is filled up from the next epoch."),
    "use_liger_kernel": ((False,), "Leave it out: it computes the loss inside the model, from local rows."),
    "include_num_input_tokens_seen": ((False, "no"), "Leave it out; tokens are in every step's report."),
    "activation_offloading": ((False,), "Leave it out, or use gradient_checkpointing."),
}


def flexible(trainer_class: type) -> Any:
    """A trainer class whose steps run on flexible groups.

    ::

        trainer = flexible(SFTTrainer)(model, args, train_dataset=…, groups=Groups(tokens_per_rank=8192))

    Everything else of the script stays as it is. A step holds as many rows as before
    (`per_device_train_batch_size` · `gradient_accumulation_steps` · ranks), and rows that were packed are
    taken apart into their documents, which the planner packs anew; where documents per row differ, a step has
    as many documents as so many rows have on average.

    Args:
        trainer_class: `transformers.Trainer`, TRL's `SFTTrainer`, or a subclass that leaves their loss and
            training step alone.

    Raises:
        UnsupportedError: the class computes a loss of its own.
    """
    for method in ("compute_loss", "training_step", "get_train_dataloader"):
        owner = next((c for c in trainer_class.__mro__ if method in vars(c)), None)
        module = owner.__module__ if owner is not None else ""
        if module not in ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.base_trainer"):
            raise UnsupportedError(
                f"{trainer_class.__name__} has a {method} of its own, which groups would pass by",
                "Use transformers.Trainer or trl.SFTTrainer, or write the loop with flexcp.Engine.",
            )
    return type(f"Flexible{trainer_class.__name__}", (_Flexible, trainer_class), {"__module__": __name__})


class _Flexible:
    """What `flexible` puts before a trainer."""

    args: Any
    model: Any
    state: Any
    model_wrapped: Any
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    optimizer: Any
    accelerator: Any

    def __init__(self, *positional: Any, groups: Groups | None = None, **keywords: Any) -> None:
        self._groups = groups or Groups()
        self._engine: Engine | None = None
        self._steps: Iterator[Step] | None = None
        self._samples: RowSamples | None = None
        self._report: StepReport | None = None
        self._resume_from: Any = None
        self._broadcasting: Any = None
        super().__init__(*positional, **keywords)
        cast(Any, self).add_callback(KeepsState(lambda: self._engine))
        self._check()

    def _check(self) -> None:
        """Refuse by name what groups would compute otherwise, before anything is trained."""
        for name, (allowed, remedy) in _REFUSED_ARGUMENTS.items():
            value = getattr(self.args, name, allowed[0])
            if value not in allowed:
                raise UnsupportedError(f"args.{name} is {value!r}", remedy)
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name, None) is not None:
                raise UnsupportedError(
                    f"{name} is given, and no rank holds the logits of a whole sample",
                    "Leave it out; the loss is that of the targets.",
                )
        if self._groups.hardware is None and self.args.device.type != "cpu":
            raise ConfigError(
                f"the ranks are of type {self.args.device.type!r}, and no hardware is named",
                'For example groups=Groups(hardware="h100"), or the .json of `flexcp profile`.',
            )
        if self.args.n_gpu > 1:
            raise UnsupportedError(
                f"one process has {self.args.n_gpu} devices", "Start one process a device, with torchrun."
            )
        check_supported(inner_model(self.model).config)

    # ------------------------------------------------------------------ what the trainer asks for

    def train(self, *positional: Any, **keywords: Any) -> Any:
        """See the trainer's own `train`."""
        self._resume_from = keywords.get("resume_from_checkpoint", positional[0] if positional else None)
        with _world_of_one(), contextlib.ExitStack() as stack:
            if not is_enabled(self.model):
                stack.enter_context(enable(self.model))
            try:
                return super().train(*positional, **keywords)  # type: ignore[misc]
            finally:
                self._end()

    def get_train_dataloader(self) -> Any:
        """Counts the steps of an epoch: what is in them comes from the engine."""
        if self.train_dataset is None:
            raise ConfigError("there is no train_dataset", "Give the trainer one.")
        self._samples = RowSamples(self.train_dataset, self.data_collator)
        steps = math.ceil(len(self._samples) / self._global_batch)
        count = steps * self.args.gradient_accumulation_steps
        return DataLoader([{"part": i} for i in range(count)], batch_size=1, collate_fn=_only)  # type: ignore[arg-type]

    def num_examples(self, dataloader: Any) -> int:
        """Samples of the training data."""
        return len(self._samples) if self._samples is not None else 0

    def floating_point_ops(self, inputs: Any) -> float:
        """Of this rank's share of a step: 6 for every weight and token, as the trainer counts them."""
        if self._report is None or not self._is_last(inputs):
            return 0.0
        weights = inner_model(self.model).num_parameters(exclude_embeddings=True)
        return 6.0 * self._report.tokens * weights / dist.get_world_size()

    def training_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
        """All of a step, when its last part is asked for: the trainer clips and steps after it.

        Returns:
            The mean loss over the supervised tokens of the whole step, the same on every rank.
        """
        if not self._is_last(inputs):
            return torch.zeros((), device=self.args.device)
        step = next(self._iterator(model))
        model.train()
        for micro in step:
            step.backward(self._forward(micro), micro)
        self._report = step.finish()
        return torch.tensor(self._report.loss, device=self.args.device)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Mean loss over the supervised tokens, by the path of training."""
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]
        if isinstance(data, dict):
            found: dict[str, float] = {}
            for key, part in data.items():
                found.update(self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{key}"))
            return found
        if data is None:
            raise ConfigError(
                "there is no eval_dataset", "Give the trainer one, or evaluate(eval_dataset=…)."
            )
        begun_s = time.perf_counter()
        samples = RowSamples(data, self.data_collator)
        with _world_of_one(), contextlib.ExitStack() as stack:
            if not is_enabled(self.model):
                stack.enter_context(enable(self.model))
            if self._engine is None:
                stack.callback(self._restore_broadcasts)
            engine = self._engine or stack.enter_context(self._make_engine(self.model_wrapped, samples))
            loss = engine.evaluate(samples, self._forward)
        runtime_s = time.perf_counter() - begun_s
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_runtime": round(runtime_s, 4),
            f"{metric_key_prefix}_samples_per_second": round(len(samples) / runtime_s, 3),
        }
        trainer = cast(Any, self)
        trainer.log(metrics)
        trainer.control = trainer.callback_handler.on_evaluate(
            self.args, self.state, trainer.control, metrics
        )
        return metrics

    def predict(self, *_: Any, **__: Any) -> Any:
        """Refused: no rank holds the logits of a whole sample."""
        raise UnsupportedError(
            "predictions were asked for, and no rank holds the logits of a whole sample",
            "Load the saved model into a plain trainer for it.",
        )

    def log(self, logs: dict[str, float], *positional: Any, **keywords: Any) -> None:
        """The trainer's log, with what the plan of the last step was."""
        if self._report is not None and "loss" in logs:
            report = self._report
            logs = {
                **logs,
                "flexcp/gap": round(report.gap, 4),
                "flexcp/idle": round(report.idle_share, 4),
                "flexcp/largest_degree": max(report.degrees),
                "flexcp/tokens": report.tokens,
            }
        super().log(logs, *positional, **keywords)  # type: ignore[misc]

    # ------------------------------------------------------------------ how it is done

    @property
    def _global_batch(self) -> int:
        """Samples of a step."""
        args, samples = self.args, cast(RowSamples, self._samples)
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        share: float = rows * len(samples) / samples.num_rows
        return max(1, round(share))

    def _is_last(self, inputs: Any) -> bool:
        return (int(inputs["part"]) + 1) % int(self.args.gradient_accumulation_steps) == 0

    def _iterator(self, model: Any) -> Iterator[Step]:
        if self._steps is None:
            samples = cast(RowSamples, self._samples)
            self._engine = self._make_engine(model, samples, self._global_batch)
            self._engine.next_step = self.state.global_step
            if self._resume_from:
                resume(self._engine, self._resume_from, self.args.output_dir, self.state.global_step)
            self._steps = iter(self._engine)
        return self._steps

    def _make_engine(self, model: Any, samples: RowSamples, global_batch: int | None = None) -> Engine:
        if isinstance(model, FullyShardedDataParallel):
            raise UnsupportedError(
                "the model is sharded by FSDP of version 1, which gathers weights in every forward",
                "Use fsdp_version 2, or DDP.",
            )
        groups, world = self._groups, dist.get_world_size()
        shape = shape_of(text_config(inner_model(model).config))
        hardware = hardware_at(groups.hardware or "cpu")
        checkpointing = _recomputes(self.args)
        budget = groups.tokens_per_rank or tokens_per_rank(
            shape, hardware, world, sharding=_sharding(model), checkpointing=checkpointing
        )
        per_node = groups.ranks_per_node or ranks_of_a_node(min(world, local_size()))
        cluster = Cluster(world, budget, per_node)
        cost = cost_model(shape, hardware, checkpointing=checkpointing)
        planner = Planner(cluster, cost, policy=groups.policy, whole_below_tokens=groups.whole_below_tokens)
        if getattr(model, "broadcast_buffers", None):
            self._broadcasting = model
            model.broadcast_buffers = False  # a collective in forward, which ranks without a task do not join
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return Engine(
            model,
            _LeftToTheTrainer(),
            planner,
            samples,
            global_batch=global_batch or min(len(samples), 8 * world),
            seed=seed,
            learn_costs=groups.learn_costs,
            timeout_s=groups.timeout_s,
        )

    def _forward(self, micro: MicroBatch) -> Any:
        context = cast(Any, self).compute_loss_context_manager
        with context():
            return self.model_wrapped(**micro.inputs)

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = self._steps = None
        self._restore_broadcasts()

    def _restore_broadcasts(self) -> None:
        if self._broadcasting is not None:
            self._broadcasting.broadcast_buffers = True
            self._broadcasting = None


class _LeftToTheTrainer(torch.optim.Optimizer):
    """The engine's optimizer: the trainer clips, steps and clears gradients itself, after the engine."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(())], {})
        self.param_groups.clear()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing."""


def _sharding(model: Any) -> Literal["ddp", "zero1"]:
    """What a rank holds of the model between steps; weights of FSDP2 are whole within a step."""
    return "zero1" if isinstance(model, FSDPModule) else "ddp"


def _recomputes(args: Any) -> bool:
    """Whether activations are recomputed; the argument's name changed within transformers 5."""
    known = getattr(args, "activation_checkpointing", None)
    return bool(args.gradient_checkpointing if known is None else known)


def _only(parts: list[dict[str, int]]) -> dict[str, int]:
    return parts[0]


@contextlib.contextmanager
def _world_of_one() -> Iterator[None]:
    """A script that was not started by torchrun has no process group; the engine needs one."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
