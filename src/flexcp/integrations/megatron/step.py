"""One step on one process: what Megatron's schedule is called with, and what came out of it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.core.errors import RunError
from flexcp.integrations.megatron.batches import Batches, by_wave
from flexcp.integrations.megatron.recording import Measured, durations_of
from flexcp.runtime.batches import MicroBatch
from flexcp.runtime.collectives import all_gather_rows, collective_device
from flexcp.runtime.feed import Prepared

if TYPE_CHECKING:
    from flexcp.integrations.megatron.engine import Engine


class Step:
    """One global batch: `forward_backward_func(…, **step.schedule)`, the optimizer step, then `finish`.

    Attributes:
        index: index of the step.
        plan: the plan, the same on all processes.
        supervised_tokens: of the whole global batch.
        num_microbatches: of this process. Equal on all of them if there are pipelines or expert parallelism:
            a rank without a task in a wave then gets a batch without a sample. At least 1, so that every rank
            has a backward pass.
    """

    def __init__(self, engine: Engine, prepared: Prepared, supervised_tokens: int, begun_s: float) -> None:
        self.index = engine.next_step
        self.plan = prepared.plan
        self.supervised_tokens = supervised_tokens
        entries: list[MicroBatch | None] = [*prepared.micro_batches] or [None]
        if engine.grid.passes_waves_together:
            entries = by_wave(prepared.micro_batches, self.plan)
        self.num_microbatches = len(entries)
        self._engine = engine
        self._batches = Batches(entries, engine.transport, engine.row_multiple, engine.device)
        self._finished = False
        self._measured = Measured(self.plan, engine.transport.rank, prepared, begun_s)

    @property
    def schedule(self) -> dict[str, Any]:
        """Arguments of `get_forward_backward_func()(…)` that change from step to step.

        Sequence length and micro-batch size are asked for, and not used with lengths that vary.
        """
        return {
            "data_iterator": self._batches,
            "num_microbatches": self.num_microbatches,
            "seq_length": self.plan.cluster.tokens_per_rank,
            "micro_batch_size": 1,
        }

    def finish(
        self, losses: Iterable[Mapping[str, Tensor]], key: str = "lm loss", grad_norm: float | None = None
    ) -> float:
        """End the step, after the optimizer's; called once, on all processes.

        Args:
            losses: what the schedule returned: for each micro-batch what the loss function reported.
            key: the entry that holds the sum of the token losses and the number of tokens.
            grad_norm: what the optimizer's step gave, for the run folder.

        Returns:
            Mean loss over the supervised tokens of the global batch, on every process.

        Raises:
            RunError: a second call, micro-batches that were never run, or a loss of other tokens.
        """
        if self._finished:
            raise RunError(f"step {self.index} was finished twice", "Call step.finish once a step.")
        ended_s = time.perf_counter()
        times = self._measured.row(self._batches.handed, ended_s)
        total = torch.tensor([0.0, 0.0, self._batches.left, *times], dtype=torch.float64)
        if self._engine.grid.has_loss:
            for report in losses:
                total[:2] += report[key].to(total)
        rows = all_gather_rows(total.to(collective_device()), "the end of a step").cpu()
        loss_sum, tokens, left = rows[:, :3].sum(0).tolist()
        if left:
            raise RunError(
                f"step {self.index} ends with {left:.0f} micro-batches that were not run",
                "Call the schedule with **step.schedule, and next(data_iterator) once in the forward step.",
            )
        if tokens != self.supervised_tokens:
            raise RunError(
                f"the loss function counted {tokens:.0f} tokens, step {self.index} has "
                f"{self.supervised_tokens} with a label",
                "Return (loss sum, loss_mask.sum() as int, report) from the loss function.",
            )
        self._finished = True
        loss = loss_sum / tokens if tokens else math.nan
        self._record(rows[:, 3:], loss, grad_norm, ended_s)
        return loss

    def _record(self, rows: Tensor, loss: float, grad_norm: float | None, ended_s: float) -> None:
        engine, index = self._engine, self.index
        report = self._measured.report(rows, engine.grid, index, loss, self.supervised_tokens, grad_norm)
        spans = self._measured.spans(self._batches.handed, ended_s, index)
        engine._step_finished(self.plan, durations_of(rows, engine.grid), report, spans)
