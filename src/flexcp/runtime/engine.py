"""Runs steps: hands a rank its micro-batches, divides the loss once, reduces gradients once.

Written so that the training loop stays the user's own::

    with Engine(model, optimizer, planner, dataset, global_batch=512, steps=1000) as engine:
        for step in engine:
            for micro in step:
                step.backward(model(**micro.inputs), micro)
            report = step.finish()
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flexcp.core.errors import ConfigError, DataError, RunError
from flexcp.core.plan import Plan
from flexcp.core.trace import Span, TraceWriter
from flexcp.cost.correction import Correction
from flexcp.planner import Planner
from flexcp.runtime.agreement import require_agreement
from flexcp.runtime.batches import Dataset, MicroBatch, Stream, sample_name
from flexcp.runtime.callbacks import named
from flexcp.runtime.collectives import alike, all_gather_rows, collective_device, peers_in_reach
from flexcp.runtime.feed import Ahead, Feed, Prepared
from flexcp.runtime.launch import DEFAULT_TIMEOUT_S
from flexcp.runtime.learning import Learning
from flexcp.runtime.order import count_of, require_same_order
from flexcp.runtime.planning import AnyPlanner, Notify, meet
from flexcp.runtime.settings import (
    data_name,
    lengths_hash,
    require_fitting,
    require_options,
    require_own_parameters,
    settings_of,
)
from flexcp.runtime.sharding import sharding_of
from flexcp.runtime.sources import training_source, whole_source
from flexcp.runtime.standstill import StandstillNotice
from flexcp.runtime.status import tell
from flexcp.runtime.step import SEEN_S, Step, loss_sum_of
from flexcp.runtime.transport import Transport
from flexcp.runtime.vocabulary import inspection


class Engine:
    """An iterator over optimizer steps.

    All ranks construct it at the same point with equal arguments, after `init_process_group`. It owns
    background threads and on rank 0 a planner process; use it as a context manager, or call `close`. Its two
    process groups (three in mode lockstep) last as long as the world: make few engines in one process.

    Args:
        model: a plain module, a `DistributedDataParallel` (broadcast_buffers=False), or an FSDP2 module
            (see `flexcp.shard`).
        optimizer: over `model.parameters()`.
        planner: makes the plan of one global batch, on rank 0; in its mode lockstep ranks meet after every
            wave. A `flexcp.Planner` plans in a process of its own; any other callable with a `cluster` plans
            in a thread.
        dataset: map-style, with lengths (`runtime.batches.Dataset`), or a stream (`runtime.batches.Stream`).
        global_batch: samples per step.
        steps: stop before this step index; None for ever. A stream may end before.
        seed: of the sample order (a stream has its own) and of every step's random numbers.
        clip_norm: largest global gradient norm, above 0; None leaves gradients alone.
        on_step_end: called after each optimizer step (a learning-rate schedule's `step`).
        on_notice: given the text of what a user should know and what stops nothing (a plan is late, the
            planner process was started again, nothing moves), on rank 0, maybe from a background thread.
        trace: where this rank's spans go.
        learn_costs: correct the planner's cost model by measured task times, for the plans that follow.
            Plans, and with them rounding, then depend on the clock. Needs a `flexcp.Planner`.
        timeout_s: a ring message, a plan or a stream may wait this long for another rank.
        on_bad_loss: what a step does whose loss or gradient is not finite: end the run, or leave the weights
            and optimizer as they are, say so, and go on.
        stop_asked: looked at after every step; if it is true on any rank, the iteration ends on all ranks.

    Attributes:
        next_step: index of the step that comes next; what a checkpoint must remember.
        skipped_steps: how many were skipped.
        stopped: some rank has been asked to stop, so there is no next step.

    Raises:
        SampleTooLongError: a sample of the data set does not fit on the planner's cluster.
        ConfigError: planner and world disagree on the number of ranks, or the wrapping cannot serve.
        DisagreementError: ranks differ in versions, planner, data or these arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planner: AnyPlanner,
        dataset: Dataset | Stream,
        *,
        global_batch: int,
        steps: int | None = None,
        seed: int = 0,
        clip_norm: float | None = None,
        on_step_end: Callable[[], object] | None = None,
        on_notice: Notify = warnings.warn,
        trace: TraceWriter | None = None,
        learn_costs: bool = False,
        on_bad_loss: Literal["stop", "skip"] = "stop",
        stop_asked: Callable[[], bool] = lambda: False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        with alike("looking at the engine's arguments"):
            require_fitting(planner, dataset, global_batch)
            require_options(clip_norm, on_bad_loss)
            require_own_parameters(model, optimizer)
            self.sharding = sharding_of(model)
        self.model = model
        self.optimizer = optimizer
        self.planner = planner
        self.dataset = dataset
        self.global_batch = global_batch
        self.steps = steps
        self.seed = seed
        self.clip_norm = clip_norm
        self.learn_costs = learn_costs
        self.on_bad_loss = on_bad_loss
        self.stop_asked = named("stop_asked", stop_asked)
        self.notify = notify = named("on_notice", on_notice)
        self.next_step = 0
        self.skipped_steps = 0
        self.stopped = False
        self.rank = dist.get_rank()
        self.device = next(model.parameters()).device
        require_agreement(settings_of(self), "Construct the Engine with equal arguments on all ranks.")
        self._transport = Transport(timeout_s, planner.cluster.ranks_per_node)
        self._origin_s = time.perf_counter()
        self._on_step_end = on_step_end and named("on_step_end", on_step_end)
        self._trace = trace
        learning = _learning(planner) if learn_costs else None  # refuses on all ranks alike
        self._learning = learning if self.rank == 0 else None
        self._waves = dist.new_group() if getattr(planner, "mode", None) == "lockstep" else None
        self._feed = Feed(planner, self._transport, self.device, notify, timeout_s)
        self._standstill = StandstillNotice(notify, dist.get_world_size()) if self.rank == 0 else None
        self._open_step: Step | None = None
        self._closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error other ranks may never answer what the background is waiting for.
        self._close(wait=error is None)

    def __iter__(self) -> Iterator[Step]:
        """Steps from `next_step` on, while the plans of two and the data of one more are made ready.

        Raises:
            RunError: the engine is closed, or the step before was left without `finish`.
        """
        self._check_between_steps("another iteration")
        source = training_source(self.dataset, self.global_batch, self.seed, self.steps, self._feed.group)
        begun_s = time.perf_counter()
        planner_of = self._learning.planner if self._learning is not None else None
        ahead = self._feed.ahead(
            source, self.next_step, planner_of=planner_of, inspect=inspection(self.model, self.dataset)
        )
        while (prepared := self._take(ahead)) is not None:
            yield self._begin(prepared, begun_s)
            self._check_between_steps("the next step")
            if self.stopped:
                return
            begun_s = time.perf_counter()

    def _take(self, ahead: Ahead) -> Prepared | None:
        tell("waiting for its plan and data", self.next_step)
        return ahead.take()

    def _begin(self, prepared: Prepared, begun_s: float) -> Step:
        """Open a step."""
        tell("opening it", self.next_step)
        torch.manual_seed(step_seed(self.seed, self.next_step, self.rank))
        self._record_waits(prepared, begun_s)
        supervised = meet(prepared.digest, prepared.supervised_tokens, prepared.trouble)
        if supervised == 0:
            raise DataError(
                f"none of the {len(prepared.plan.samples)} samples of step {self.next_step} has a "
                "supervised token",
                "Check the labels, or use a larger global batch.",
            )
        with peers_in_reach("gathering weights"):
            self.sharding.begin()
        self._open_step = Step(self, prepared, supervised, begun_s)
        return self._open_step

    def _record_waits(self, prepared: Prepared, begun_s: float) -> None:
        """What the step waited for, in the trace; nothing where it waited for nothing."""
        planned_s = begun_s + prepared.plan_wait_s
        for name, start_s, wait_s in (
            ("plan", begun_s, prepared.plan_wait_s),
            ("data", planned_s, prepared.data_wait_s),
        ):
            if wait_s > SEEN_S:
                self.record(name, start_s, start_s + wait_s, self.next_step)

    @torch.no_grad()
    def evaluate(
        self, dataset: Dataset | Stream, forward: Callable[[MicroBatch], Any] | None = None
    ) -> float:
        """Mean loss over the supervised tokens of a whole data set, by the path of training.

        Args:
            dataset: any size, also smaller than the number of ranks; a stream is read from its start to its
                end.
            forward: from a micro-batch to logits or an output with `.logits`; the model itself by default.

        Raises:
            RunError: called inside a step, or after `close`.
            DataError: a sample cannot be read, or none has a supervised token.
        """
        self._check_between_steps("an evaluation")
        self.check(dataset)
        forward = forward or self._forward
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        supervised = 0
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with peers_in_reach("gathering weights"):
            self.sharding.begin()
        try:
            source = whole_source(dataset, self.global_batch, self._feed.group)
            ahead = self._feed.ahead(source, 0, "evaluation batch", inspect=inspection(self.model, dataset))
            while (prepared := ahead.take()) is not None:
                supervised += meet(prepared.digest, prepared.supervised_tokens, prepared.trouble)
                for waiting in prepared.micro_batches:
                    names = [sample_name(dataset, index) for index in waiting.sample_ids]
                    tell("evaluating", self.next_step, names)
                    micro = waiting.to(self.device)
                    total += loss_sum_of(forward(micro), micro)
        finally:
            self.sharding.release()
            self.model.train(modes[0][1])
            for module, was_training in modes:  # a frozen part may stand in evaluation for good
                module.training = was_training
        if supervised == 0:
            raise DataError(
                "no sample of the evaluation data has a supervised token",
                "Check the labels; of a stream also that it has records.",
            )
        mine = total[None].to(collective_device())
        return float(all_gather_rows(mine, "evaluation").sum()) / supervised

    def check(self, dataset: Dataset | Stream) -> None:
        """Refuse another data set if not all of it fits, before a later evaluation fails by it.

        Nothing is known of a stream beforehand.

        Raises:
            SampleTooLongError: the longest does not.
            DataError: there is none.
            DisagreementError: ranks have other lengths.
        """
        with alike("looking at the evaluation data"):
            require_fitting(self.planner, dataset, self.global_batch)
        lengths = {"lengths of the evaluation data": lengths_hash(dataset)}
        require_agreement(lengths, "Open the same data on all ranks.")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside weights and optimizer, in JSON values; keep that of rank 0."""
        learnt = self._learning.state_dict() if self._learning is not None else {}
        return {
            "step": self.next_step,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "data": data_name(self.dataset),
            "skipped_steps": self.skipped_steps,
            "learnt_costs": learnt,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ConfigError: seed, global batch or data differ, so other samples would follow.
            CheckpointError: it is damaged.
        """
        data = data_name(self.dataset)
        require_same_order(state, seed=self.seed, global_batch=self.global_batch, data=data)
        self.next_step = count_of(state, "step")
        self.skipped_steps = count_of(state, "skipped_steps")
        if self._learning is not None:
            self._learning.load_state_dict(state.get("learnt_costs", {}), self.next_step)

    @property
    def correction(self) -> Correction | None:
        """What has been learnt of the costs; None where nothing is learnt, and on ranks that do not plan."""
        return self._learning.latest if self._learning is not None else None

    def plan_factors(self, step: int) -> tuple[float, ...]:
        """What a running step was planned with, see `StepReport`."""
        return self._learning.known_for(step).factors if self._learning is not None else ()

    def close(self) -> None:
        """End threads and planner process; may be called twice."""
        self._close(wait=True)

    def _close(self, wait: bool) -> None:
        self._closed = True
        if self._standstill is not None:
            self._standstill.close()
        self._feed.close(wait)

    def end_wave(self) -> None:
        """Wait for all ranks, where plans are of mode lockstep; the step calls it.

        By a sum and not by a barrier, for which NCCL lets the host wait as well.
        """
        with peers_in_reach("the end of a wave"):
            dist.all_reduce(torch.zeros(1, device=collective_device(self._waves)), group=self._waves)

    def record(self, name: str, start_s: float, end_s: float, step: int, **detail: Any) -> None:
        """Write a span of one's own to the trace; times are `time.perf_counter` readings."""
        if self._trace is not None:
            span = Span(
                self.rank, name, start_s - self._origin_s, end_s - self._origin_s, step, detail or None
            )
            self._trace.write(span)

    def sample_name(self, index: int) -> str:
        """What the data set calls a sample."""
        return sample_name(self.dataset, index)

    def _step_finished(
        self, plan: Plan, durations_s: list[list[float]], *, skipped: bool, stop: bool
    ) -> None:
        """Told by `Step.finish` when the optimizer has stepped, or the step was skipped."""
        if self._learning is not None:
            self._learning.learn(self.next_step, plan, durations_s)
        self.next_step += 1
        self._open_step = None
        self.skipped_steps += skipped
        self.stopped = stop
        tell("between steps", self.next_step)
        if self._on_step_end is not None and not skipped:
            self._on_step_end()
        if self._trace is not None:
            self._trace.flush()

    def _check_between_steps(self, what: str) -> None:
        if self._closed:
            raise RunError(f"the engine was closed before {what}", "Make a new Engine.")
        if self._open_step is not None:
            raise RunError(
                f"step {self.next_step} was left without step.finish() before {what}",
                "Call step.finish() at the end of every step, on every rank.",
            )

    def _forward(self, micro: MicroBatch) -> Any:
        return self.model(**micro.inputs)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of the random numbers of one rank in one step: resuming needs no stored generator state."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)


def _learning(planner: AnyPlanner) -> Learning:
    if not isinstance(planner, Planner):
        raise ConfigError(
            f"costs cannot be learnt for a {type(planner).__name__}",
            "Use a flexcp.Planner, or learn_costs=False.",
        )
    return Learning(planner)
