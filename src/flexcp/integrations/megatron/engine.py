"""Hands Megatron's schedules their micro-batches, planned anew for every global batch.

The loop stays the user's own::

    with flexcp.megatron.Engine(model, planner, dataset, global_batch=512, steps=1000) as engine:
        for step in engine:
            ...zero_grad...
            losses = forward_backward(
                forward_step_func=forward_step, model=model, forward_only=False, **step.schedule)
            ...optimizer.step()...
            loss = step.finish(losses)

Forward, backward, gradient reduction and optimizer stay Megatron's.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from flexcp.core.errors import ConfigError, RunError, UnsupportedError
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Plan
from flexcp.core.trace import Span
from flexcp.cost.correction import Correction
from flexcp.integrations.megatron.grid import Grid, read_grid
from flexcp.integrations.megatron.hooks import LocalRotary, enable
from flexcp.integrations.megatron.recording import RunFolder, run_info, watch
from flexcp.integrations.megatron.step import Step
from flexcp.planner import Planner
from flexcp.runtime.agreement import require_agreement, versions
from flexcp.runtime.batches import Dataset, Stream, check_fits
from flexcp.runtime.callbacks import named
from flexcp.runtime.feed import Feed, Prepared
from flexcp.runtime.launch import DEFAULT_TIMEOUT_S
from flexcp.runtime.learning import Learning
from flexcp.runtime.order import require_same_order
from flexcp.runtime.planning import AnyPlanner, Notify, meet
from flexcp.runtime.settings import data_name, lengths_hash
from flexcp.runtime.sources import MapSource, in_order, shuffled
from flexcp.runtime.transport import Transport


class Engine:
    """An iterator over steps. All processes construct it at the same point with equal arguments.

    It owns a background thread, one process group for each place in a TP x PP cell, one on the host, and on
    process 0 a planner process; use it as a context manager, or call `close`.

    Args:
        model: as `get_forward_backward_func()` gets it: a `GPTModel` that went through `enable`, maybe
            wrapped by Megatron's DistributedDataParallel, maybe in a list.
        planner: makes the plan of one global batch, on process 0; see `flexcp.Engine`. Its ranks are TP x PP
            cells (`flexcp.megatron.cluster`), its mode is `lockstep` under pipelines or expert parallelism.
        dataset: map-style, with lengths; `IndexedDocuments` reads Megatron's files.
        global_batch: samples per step.
        steps: stop before this step; None for ever.
        seed: of the sample order.
        on_notice: given the text of what a user should know, on process 0, maybe from a background thread.
        folder: where metrics and traces go, for `flexcp report`; None for nowhere. Needs a `flexcp.Planner`.
        learn_costs: correct the planner's cost model by measured task times, for the plans that follow; see
            `flexcp.Engine`. Needs a `flexcp.Planner`.
        timeout_s: a message of a group or a plan may wait this long for another process.

    Attributes:
        next_step: index of the step that comes next.
        last_report: what the last finished step took; its `reduce_s` includes the optimizer.

    Raises:
        UnsupportedError, ConfigError: a model, layout or option under which training would go wrong.
        SampleTooLongError: a sample of the data set does not fit on the cluster.
        DisagreementError: processes differ in versions, planner, data or these arguments.
    """

    def __init__(
        self,
        model: Any,
        planner: AnyPlanner,
        dataset: Dataset,
        *,
        global_batch: int,
        steps: int | None = None,
        seed: int = 0,
        on_notice: Notify = warnings.warn,
        folder: Path | None = None,
        learn_costs: bool = False,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        inner = _check_model(model)
        self.grid: Grid = read_grid()
        _check_plans(planner, self.grid)
        _check_data(planner, dataset, global_batch)
        self.planner, self.dataset = planner, dataset
        self.global_batch, self.steps, self.seed = global_batch, steps, seed
        self.learn_costs = learn_costs
        self.next_step = 0
        self.last_report: StepReport | None = None
        self._counts = True
        self.device = next(inner.parameters()).device
        # Sequence parallelism scatters the rows over the TP group.
        self.row_multiple = self.grid.tensor if inner.config.sequence_parallel else 1
        self._config = inner.config
        self._ddp = _ddp_config(model)
        _check_agreement(self)
        self.transport = Transport(timeout_s, planner.cluster.ranks_per_node, self.grid.columns)
        notify = named("on_notice", on_notice)
        self._feed = Feed(planner, self.transport, self.device, notify, timeout_s)
        self._planner = _own_planner(planner) if folder is not None or learn_costs else None
        self._learning = Learning(self._planner) if self._planner is not None and learn_costs else None
        self._folder = folder
        self._files: RunFolder | None = None
        self._end_watch = watch(inner)
        self._open_step: Step | None = None
        self._closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Step]:
        """Steps from `next_step` on, while the next ones are planned and read.

        Raises:
            RunError: the engine is closed, or the step before was left without `finish`.
            ConfigError: a function that Megatron needs is missing in its config.
        """
        _check_functions(self._config, self._ddp)
        self._check_between_steps("another iteration")
        self._open_files()
        indices = shuffled(self.dataset, self.global_batch, self.seed, self.steps)
        begun_s = time.perf_counter()
        source = MapSource(self.dataset, indices, self.transport.rank)
        planner_of = self._learning.planner if self._learning is not None else None
        ahead = self._feed.ahead(source, self.next_step, planner_of=planner_of)
        while (prepared := ahead.take()) is not None:
            yield self._begin(prepared, begun_s)
            self._check_between_steps("the next step")
            begun_s = time.perf_counter()

    def evaluation(self, dataset: Dataset) -> Iterator[Step]:
        """Every sample of another data set once, in steps that do not count.

        Run them with `forward_only=True` and the model in evaluation mode; `finish` each.

        Raises:
            RunError: called inside a step, or after `close`.
            SampleTooLongError: a sample does not fit.
        """
        self._check_between_steps("an evaluation")
        _check_data(self.planner, dataset, self.global_batch)
        source = MapSource(dataset, in_order(dataset, self.global_batch), self.transport.rank)
        before, self._counts = self.next_step, False
        ahead = self._feed.ahead(source, 0, "evaluation batch")
        try:
            while (prepared := ahead.take()) is not None:
                yield self._begin(prepared, time.perf_counter())
                self._check_between_steps("the next batch of an evaluation")
        finally:
            self.next_step, self._counts = before, True

    def _open_files(self) -> None:
        if self._folder is not None and self._planner is not None and self._files is None:
            first = dist.get_rank() == 0
            info = run_info(self._planner, self._config, self.device) if first else None
            self._files = RunFolder(self._folder, self.next_step, self.grid, self.transport.rank, info)

    def _begin(self, prepared: Prepared, begun_s: float) -> Step:
        mine = prepared.supervised_tokens if self.grid.is_first else 0
        supervised = meet(prepared.digest, mine, prepared.trouble)
        self._open_step = Step(self, prepared, supervised, begun_s)
        return self._open_step

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside what Megatron saves; JSON, for a place in its checkpoint.

        The same on all processes.
        """
        learnt = self._learning.state_dict() if self._learning is not None else {}
        return {
            "step": self.next_step,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "data": data_name(self.dataset),
            "learnt_costs": learnt,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            ConfigError: seed, global batch or data differ, so other samples would follow.
        """
        data = data_name(self.dataset)
        require_same_order(state, seed=self.seed, global_batch=self.global_batch, data=data)
        self.next_step = state["step"]
        if self._learning is not None:
            self._learning.load_state_dict(state["learnt_costs"], self.next_step)

    @property
    def correction(self) -> Correction | None:
        """What has been learnt of the costs; None where nothing is learnt."""
        return self._learning.latest if self._learning is not None else None

    def close(self) -> None:
        """End thread and planner process; may be called twice."""
        self._closed = True
        self._feed.close()
        self._end_watch()
        if self._files is not None:
            self._files.close()

    def _step_finished(
        self, plan: Plan, durations_s: list[list[float]], report: StepReport, spans: Sequence[Span]
    ) -> None:
        """Told by `Step.finish`; steps of an evaluation are not remembered."""
        if self._counts:
            if self._learning is not None:
                report = replace(report, plan_factors=self._learning.known_for(self.next_step).factors)
                self._learning.learn(self.next_step, plan, durations_s)
            self.last_report = report
            if self._files is not None:
                self._files.step(report, spans, self.correction)
        self.next_step += 1
        self._open_step = None

    def _check_between_steps(self, what: str) -> None:
        if self._closed:
            raise RunError(f"the engine was closed before {what}", "Make a new Engine.")
        if self._open_step is not None:
            raise RunError(
                f"step {self._open_step.index} was left without step.finish(…) before {what}",
                "Call step.finish(losses) at the end of every step, on every process.",
            )


def _chunks(model: Any) -> Sequence[Any]:
    return model if isinstance(model, list) else [model]


def _ddp_config(model: Any) -> Any:
    return getattr(_chunks(model)[0], "ddp_config", None)


def _check_model(model: Any) -> Any:
    """The GPT model inside, which must have been enabled."""
    if len(_chunks(model)) > 1:
        raise UnsupportedError(
            f"the model has {len(_chunks(model))} chunks: FlexCP does not train interleaved pipelines",
            "Leave virtual_pipeline_model_parallel_size unset.",
        )
    inner = _chunks(model)[0]
    while not isinstance(inner, GPTModel) and hasattr(inner, "module"):
        inner = inner.module
    ddp = _ddp_config(model)
    if getattr(ddp, "use_megatron_fsdp", False) or getattr(ddp, "use_custom_fsdp", False):
        raise UnsupportedError(
            "Megatron-FSDP gathers weights in every forward pass, so all ranks would need as many",
            "Use DistributedDataParallel with use_distributed_optimizer=True.",
        )
    rotary = getattr(inner, "rotary_pos_emb", None)
    if isinstance(inner, GPTModel) and rotary is not None and not isinstance(rotary, LocalRotary):
        raise ConfigError(
            "the model would rotate by the places of rows in their slice",
            "Return flexcp.megatron.enable(model) from the model provider.",
        )
    return enable(inner)


def _own_planner(planner: AnyPlanner) -> Planner:
    if not isinstance(planner, Planner):
        raise ConfigError(
            f"a {type(planner).__name__} predicts no times to record or to learn from",
            "Use a flexcp.Planner, or neither folder nor learn_costs.",
        )
    return planner


def _check_plans(planner: AnyPlanner, grid: Grid) -> None:
    if planner.cluster.ranks != grid.cells:
        raise ConfigError(
            f"the planner plans for {planner.cluster.ranks} ranks, Megatron has {grid.cells} "
            "data-parallel ranks",
            "Make the planner's cluster with flexcp.megatron.cluster(tokens_per_rank).",
        )
    if grid.passes_waves_together and isinstance(planner, Planner) and planner.mode != "lockstep":
        raise ConfigError(
            f"the planner's mode is {planner.mode!r}; pipelines and expert parallelism pass waves in step",
            'Make the planner with mode="lockstep".',
        )


def _check_data(planner: AnyPlanner, dataset: Dataset, global_batch: int) -> None:
    if isinstance(dataset, Stream):
        raise UnsupportedError(
            "streams are not read under a TP x PP grid", "Give a data set with lengths and an index."
        )
    check_fits(dataset, planner.cluster, global_batch)


def _check_functions(config: Any, ddp: Any) -> None:
    """What `megatron.training` sets and a loop of one's own forgets: gradients would be wrong in silence."""
    if config.finalize_model_grads_func is None:
        raise ConfigError(
            "config.finalize_model_grads_func is not set: gradients would not be reduced or divided",
            "Set it to megatron.core.distributed.finalize_model_grads.",
        )
    if getattr(ddp, "overlap_grad_reduce", False) and config.no_sync_func is None:
        raise ConfigError(
            "overlap_grad_reduce is on and config.no_sync_func is not set",
            "Set config.no_sync_func = model.no_sync: only the last backward pass may reduce.",
        )


def _check_agreement(engine: Engine) -> None:
    """Every process must run the same code on the same data in the same way, or no plan fits all."""
    planner = engine.planner
    values = {
        **versions(),
        "version of megatron-core": version("megatron-core"),
        "planner": repr(planner if isinstance(planner, Planner) else planner.cluster),
        "lengths of the data set": lengths_hash(engine.dataset),
        "global_batch": str(engine.global_batch),
        "number of steps": str(engine.steps),
        "seed": str(engine.seed),
        "learn_costs": str(engine.learn_costs),
    }
    require_agreement(values, "Construct the Engine with equal arguments on all processes.")
