"""Runs steps: hands a rank its micro-batches, divides the loss once, reduces gradients once.

Written so that the training loop stays the user's own::

    engine = Engine(model, optimizer, planner, dataset, global_batch=512, steps=1000)
    for step in engine:
        for micro in step:
            step.backward(model(**micro.inputs), micro)
        report = step.finish()
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flexcp.core.errors import ConfigError, DataError, RunError, SampleTooLongError, UnsupportedError
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.core.trace import Span, TraceWriter
from flexcp.planner import Planner
from flexcp.runtime.batches import Dataset, MicroBatch, load_examples, make_micro_batch
from flexcp.runtime.loss import token_loss_sum
from flexcp.runtime.metrics import StepReport
from flexcp.runtime.order import global_batch as batch_indices
from flexcp.runtime.planning import PlanFeed, PlannedStep, all_gather_rows, meet
from flexcp.runtime.sharding import clip_gradients, sharding_of
from flexcp.runtime.transport import Transport, peers_in_reach


class Engine:
    """An iterator over optimizer steps.

    All ranks construct it at the same point with equal arguments, after `init_process_group`.

    Args:
        model: a plain module, a `DistributedDataParallel` (broadcast_buffers=False), or an FSDP2 module
            (see `runtime.sharding.shard`).
        optimizer: over `model.parameters()`.
        planner: makes the plan of one global batch.
        dataset: map-style, with lengths (see `runtime.batches.Dataset`).
        global_batch: samples per step.
        steps: stop before this step index; None for ever.
        seed: of the sample order and of every step's random numbers.
        clip_norm: largest global gradient norm; None leaves gradients alone.
        on_step_end: called after each optimizer step (a learning-rate schedule's `step`).
        trace: where this rank's spans go.

    Raises:
        SampleTooLongError: a sample of the data set does not fit on the planner's cluster.
        ConfigError: planner and world disagree on the number of ranks, or the wrapping cannot serve.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planner: Planner,
        dataset: Dataset,
        *,
        global_batch: int,
        steps: int | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        on_step_end: Callable[[], object] | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        _check(planner, dataset, global_batch)
        self.model = model
        self.optimizer = optimizer
        self.planner = planner
        self.dataset = dataset
        self.global_batch = global_batch
        self.steps = steps
        self.seed = seed
        self.clip_norm = clip_norm
        self.step = 0
        self.rank = dist.get_rank()
        self.device = next(model.parameters()).device
        self.sharding = sharding_of(model)
        self.transport = Transport()
        self.started_s = time.perf_counter()
        self._on_step_end = on_step_end
        self._trace = trace
        self._feed = PlanFeed(planner, self.device)
        self._loader = ThreadPoolExecutor(1, "flexcp-data")

    def __iter__(self) -> Iterator[Step]:
        """Steps from `self.step` on; planning and reading run one step ahead."""
        self._feed.drop()
        self._prepare(self.step)
        self._prepare(self.step + 1)
        coming = self._receive(self.step)
        while coming is not None:
            torch.manual_seed(hash_seed(self.seed, self.step, self.rank))
            begun_s = time.perf_counter()
            planned, loading = coming
            micro_batches = loading.result()
            loaded_s = time.perf_counter() - begun_s
            coming = self._receive(self.step + 1)
            self._prepare(self.step + 2)
            exposed_s = loaded_s + (coming[0].waited_s if coming else 0.0)
            step = Step(self, planned, micro_batches, begun_s, exposed_s)
            yield step
            if not step.finished:
                raise RunError(f"step {step.index} was left without step.finish()")
            self.step += 1

    @torch.no_grad()
    def evaluate(self, dataset: Dataset, forward: Callable[[MicroBatch], Any] | None = None) -> float:
        """Mean loss over the supervised tokens of a whole data set, by the path of training.

        Args:
            dataset: any size, also smaller than the number of ranks.
            forward: from a micro-batch to logits or an output with `.logits`; the model itself by default.
        """
        if forward is None:
            forward = self._forward
        feed = PlanFeed(self.planner, self.device)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        was_training = self.model.training
        self.model.eval()
        with peers_in_reach("gathering weights"):
            self.sharding.begin()
        for start in range(0, len(dataset), self.global_batch):
            indices = np.arange(start, min(start + self.global_batch, len(dataset)))
            feed.prepare(_samples(dataset, indices))
            for micro in self._load(feed.receive().plan, dataset):
                total[0] += _loss_sum(forward(micro), micro).double()
                total[1] += micro.supervised_tokens
        self.sharding.release()
        self.model.train(was_training)
        feed.close()
        loss_sum, supervised = all_gather_rows(total, "evaluation").sum(0).tolist()
        if supervised == 0:
            raise DataError("no sample of the evaluation data has a supervised token")
        return float(loss_sum / supervised)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside weights and optimizer."""
        return {"step": self.step, "seed": self.seed, "global_batch": self.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ConfigError: seed or global batch differ, so other samples would follow.
        """
        for key in ("seed", "global_batch"):
            if state[key] != getattr(self, key):
                raise ConfigError(
                    f"the checkpoint was made with {key} = {state[key]}, this run has {getattr(self, key)}",
                    "Resume with the same value, or start a new run.",
                )
        self.step = state["step"]

    def close(self) -> None:
        """End the background threads."""
        self._feed.close()
        self._loader.shutdown(cancel_futures=True)

    def record(self, name: str, start_s: float, end_s: float, step: int, **detail: Any) -> None:
        """Write a span to the trace; times are `time.perf_counter` readings."""
        if self._trace is not None:
            origin = self.started_s
            self._trace.write(Span(self.rank, name, start_s - origin, end_s - origin, step, detail or None))

    def end_step(self) -> None:
        """Called by `Step.finish` after the optimizer."""
        if self._on_step_end is not None:
            self._on_step_end()
        if self._trace is not None:
            self._trace.flush()

    def _forward(self, micro: MicroBatch) -> Any:
        return self.model(**micro.inputs)

    def _has(self, step: int) -> bool:
        return self.steps is None or step < self.steps

    def _prepare(self, step: int) -> None:
        if self._has(step):
            indices = batch_indices(len(self.dataset), self.global_batch, self.seed, step)
            self._feed.prepare(_samples(self.dataset, indices))

    def _receive(self, step: int) -> tuple[PlannedStep, Future[list[MicroBatch]]] | None:
        """The plan of a step, and its data on the way; None behind the last step."""
        if not self._has(step):
            return None
        planned = self._feed.receive()
        return planned, self._loader.submit(self._load, planned.plan, self.dataset)

    def _load(self, plan: Plan, dataset: Dataset) -> list[MicroBatch]:
        examples = load_examples(dataset, plan, self.rank)
        return [
            make_micro_batch(plan, plan.tasks[index], examples, self.transport, self.device)
            for index in plan.tasks_of(self.rank)
        ]


class Step:
    """One global batch on this rank: iterate, call `backward` for each micro-batch, then `finish`.

    Attributes:
        index: index of the step.
        plan: the plan, the same on all ranks.
        supervised_tokens: of the whole global batch; the divisor of the loss.
        loss_sum: sum of the token losses that this rank has run so far.
    """

    def __init__(
        self,
        engine: Engine,
        planned: PlannedStep,
        micro_batches: list[MicroBatch],
        begun_s: float,
        exposed_s: float,
    ) -> None:
        self.index = engine.step
        self.plan = planned.plan
        self.finished = False
        self._engine = engine
        self._planned = planned
        self._micro_batches = micro_batches
        self._begun_s = begun_s
        self._exposed_s = exposed_s
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
        self._busy_s = 0.0
        self._task_begun_s = 0.0
        mine = sum(micro.supervised_tokens for micro in micro_batches)
        self.supervised_tokens = meet(self.plan, mine, engine.device).supervised_tokens
        if self.supervised_tokens == 0:
            raise DataError(
                f"none of the {len(self.plan.samples)} samples of step {self.index} has a supervised token",
                "Check the labels, or use a larger global batch.",
            )
        with peers_in_reach("gathering weights"):
            engine.sharding.begin()
        self._work_begun_s = time.perf_counter()

    def __iter__(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches in plan order; there may be none."""
        for micro in self._micro_batches:
            self._task_begun_s = time.perf_counter()
            yield micro

    def backward(self, output: Any, micro: MicroBatch) -> None:
        """Add the gradient of one micro-batch.

        Args:
            output: logits [1, T, V], a model output with `.logits`, or a scalar: the *sum* (not the mean)
                of the token losses of `micro`.
            micro: what the output was computed from.
        """
        loss_sum = _loss_sum(output, micro)
        (loss_sum / self.supervised_tokens).backward()  # type: ignore[no-untyped-call]
        self.loss_sum += loss_sum.detach()
        now_s = time.perf_counter()
        self._busy_s += now_s - self._task_begun_s
        self._engine.record(
            "task",
            self._task_begun_s,
            now_s,
            self.index,
            degree=micro.task.degree,
            samples=micro.sample_ids,
            predicted_s=micro.task.duration_s,
        )

    def reduce_gradients(self) -> float:
        """Sum gradients over all ranks and clip; returns the norm before clipping (NaN when not clipping)."""
        engine = self._engine
        with peers_in_reach("the gradient reduction"):
            engine.sharding.reduce()
            if engine.clip_norm is None:
                return math.nan
            return clip_gradients(engine.model.parameters(), engine.clip_norm)

    def finish(self) -> StepReport:
        """Reduce, clip, step the optimizer, and say what happened.

        Raises:
            RunError: the loss is not finite; weights are untouched.
        """
        engine = self._engine
        worked_s = time.perf_counter()
        grad_norm = self.reduce_gradients()
        reduced_s = time.perf_counter()
        measured_s = worked_s - self._work_begun_s
        mine = [float(self.loss_sum), self._busy_s, measured_s, self._exposed_s]
        row = torch.tensor(mine, dtype=torch.float64, device=engine.device)
        rows = all_gather_rows(row, "the end of a step")
        loss = float(rows[:, 0].sum()) / self.supervised_tokens
        if not math.isfinite(loss):
            raise RunError(
                f"the loss of step {self.index} is {loss}; samples {[s.id for s in self.plan.samples]}",
                "The weights were not changed. Look at these samples, or lower the learning rate.",
            )
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        end_s = time.perf_counter()
        engine.record("reduce", worked_s, reduced_s, self.index)
        engine.record("optimizer", reduced_s, end_s, self.index)
        engine.end_step()
        self.finished = True
        return self._report(loss, grad_norm, rows, end_s - self._begun_s)

    def _report(self, loss: float, grad_norm: float, rows: Tensor, step_s: float) -> StepReport:
        measured_s = float(rows[:, 2].max())
        return StepReport(
            step=self.index,
            loss=loss,
            grad_norm=grad_norm,
            tokens=sum(sample.tokens for sample in self.plan.samples),
            supervised_tokens=self.supervised_tokens,
            degrees=self.plan.degrees,
            predicted_s=self.plan.step_s,
            bound_s=self.plan.bound_s,
            measured_s=measured_s,
            step_s=step_s,
            plan_s=self._planned.plan_s,
            exposed_s=float(rows[:, 3].max()),
            idle_share=max(0.0, 1.0 - float(rows[:, 1].mean()) / measured_s) if measured_s > 0 else 0.0,
        )


def hash_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the random numbers of one rank in one step: resuming needs no stored generator state."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def _check_attention_ran(micro: MicroBatch) -> None:
    """A model that drops the keyword attends inside its local rows only: wrong, and nothing would show it."""
    if micro.inputs["flexcp"].calls == 0:
        raise UnsupportedError(
            "the model ran without FlexCP attention",
            "Wrap the loop in `with flexcp.integrations.transformers.enable(model)`, or call "
            "flexcp.attention.ring_attention with the keyword `flexcp` in your own attention layer.",
        )


def _loss_sum(output: Any, micro: MicroBatch) -> Tensor:
    _check_attention_ran(micro)
    value: Tensor = output if isinstance(output, Tensor) else output.logits
    return value if value.dim() == 0 else token_loss_sum(value, micro.labels)


def _samples(dataset: Dataset, indices: Sequence[int] | np.ndarray[Any, Any]) -> tuple[Sample, ...]:
    return tuple(Sample(int(index), int(dataset.lengths[int(index)])) for index in indices)


def _check(planner: Planner, dataset: Dataset, global_batch: int) -> None:
    cluster = planner.cluster
    if cluster.ranks != dist.get_world_size():
        raise ConfigError(
            f"the planner plans for {cluster.ranks} ranks, the world has {dist.get_world_size()}",
            "Make the planner's Cluster with ranks=dist.get_world_size().",
        )
    if global_batch < 1:
        raise ConfigError(f"global_batch is {global_batch}", "A step needs at least one sample.")
    if len(dataset) == 0:
        raise DataError("the data set is empty", "Give at least one sample.")
    longest = int(np.argmax(dataset.lengths))
    tokens = int(dataset.lengths[longest])
    if tokens > cluster.capacity_tokens:
        raise SampleTooLongError(longest, tokens, cluster.tokens_per_rank, cluster.ranks)
