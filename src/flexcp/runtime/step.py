"""One step on one rank: backward for every micro-batch, then one reduction and one optimizer step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexcp.core.errors import LossError, RunError, UnsupportedError
from flexcp.core.metrics import StepReport
from flexcp.core.plan import Task
from flexcp.core.trace import task_detail
from flexcp.runtime.batches import MicroBatch
from flexcp.runtime.clock import Clock, Mark
from flexcp.runtime.collectives import all_gather_rows, collective_device, peers_in_reach
from flexcp.runtime.feed import Prepared
from flexcp.runtime.loss import token_loss_sum
from flexcp.runtime.sharding import clip_gradients
from flexcp.runtime.status import tell

if TYPE_CHECKING:
    from flexcp.runtime.engine import Engine

SEEN_S = 1e-3  # a shorter wait is no span of the trace
_NUMBERS = 10  # of a rank at the end of a step, before the durations of its tasks


@dataclass(frozen=True, slots=True)
class _Running:
    """A micro-batch that was handed out: when, and after how many backwards."""

    micro: MicroBatch
    begun: Mark
    after: int


class Step:
    """One global batch on this rank: iterate, call `backward` for each micro-batch, then `finish`.

    Attributes:
        index: index of the step.
        plan: the plan, the same on all ranks.
        supervised_tokens: of the whole global batch; the divisor of the loss.
        loss_sum: sum of the token losses that this rank has run so far.
    """

    def __init__(self, engine: Engine, prepared: Prepared, supervised_tokens: int, begun_s: float) -> None:
        self.index = engine.next_step
        self.plan = prepared.plan
        self.supervised_tokens = supervised_tokens
        self._tokens = sum(sample.tokens for sample in self.plan.samples)
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
        self._engine = engine
        self._prepared = prepared
        self._coming = list(prepared.micro_batches)
        self._count = len(self._coming)
        self._running: deque[_Running] = deque()
        self._begun_s = begun_s
        self._work_begun_s = time.perf_counter()
        self._clock = Clock(engine.device)
        self._last_ended = self._clock.mark()
        self._unread: list[tuple[Mark, Mark, Task, list[tuple[float, float]]]] = []
        waited_s = begun_s + prepared.plan_wait_s + prepared.data_wait_s
        engine.record("gather", waited_s, self._work_begun_s, self.index)
        self._work_ended_s = 0.0
        self._busy_s = self._ring_wait_s = self._reduce_s = 0.0
        self._durations_s: list[float] = []
        self._grad_norm: float | None = None
        self._task_losses: list[tuple[tuple[int, ...], Tensor]] = []
        self._finished = False

    def __iter__(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches in plan order; there may be none.

        In a plan of mode lockstep all ranks meet after every wave, so each micro-batch needs its backward
        before the next one is asked for.
        """
        if self.plan.mode != "lockstep":
            while self._coming:
                yield self._next()
            return
        for wave in sorted({task.wave for task in self.plan.tasks}):
            while self._coming and self._coming[0].task.wave == wave:
                yield self._next()
            self._engine.end_wave()

    def _next(self) -> MicroBatch:
        """Begin a task; one at a time, so that the device holds no data of later ones."""
        waiting = self._coming.pop(0)
        names = [self._engine.sample_name(index) for index in waiting.sample_ids]
        number, count = self._count - len(self._coming), self._count
        tell(f"task {number} of {count} on ranks {list(waiting.task.ranks)}", self.index, names)
        begun = self._clock.mark()
        micro = waiting.to(self._engine.device)
        self._running.append(_Running(micro, begun, after=len(self._task_losses)))
        return micro

    def backward(self, output: Any, micro: MicroBatch) -> None:
        """Add the gradient of one micro-batch; each must come exactly once, in order.

        Args:
            output: logits [1, T, V], a model output with `.logits`, or a scalar: the *sum* (not the mean)
                of the token losses of `micro`.
            micro: what the output was computed from.

        Raises:
            RunError: this micro-batch does not belong to the step, has had its backward, or is not the next.
            UnsupportedError: the model ignored FlexCP's attention.
        """
        if not self._running or self._running[0].micro is not micro:
            raise RunError(
                f"step {self.index} got a micro-batch that is not its own, got it twice, or not in order",
                "Call step.backward once for each micro-batch that the step yields, in that order.",
            )
        _check_attention_ran(micro)
        running = self._running.popleft()
        loss_sum = loss_sum_of(output, micro)
        loss = loss_sum / self.supervised_tokens
        auxiliary_sum = micro.inputs["flexcp"].auxiliary_sum
        if auxiliary_sum is not None:
            loss = loss + auxiliary_sum / self._tokens
        self._engine.sharding.before_backward()
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss_sum += loss_sum.detach()
        self._record_task(running)
        self._task_losses.append((micro.sample_ids, loss_sum.detach()))

    def _record_task(self, running: _Running) -> None:
        """A task ends here in the work. It began when it was handed out, or when the one before it ended."""
        begun = running.begun if running.after == len(self._task_losses) else self._last_ended
        self._last_ended = self._clock.mark()
        waits = running.micro.inputs["flexcp"].exchange.waits
        self._unread.append((begun, self._last_ended, running.micro.task, waits))
        if self._clock.is_immediate:
            self._read_tasks()

    def _read_tasks(self) -> None:
        """The spans of tasks that are done, and those of the waits in them that one could see."""
        engine = self._engine
        for begun, ended, task, waits in self._unread:
            begun_s, ended_s = self._clock.read_s(begun), self._clock.read_s(ended)
            ring_wait_s = sum(end_s - start_s for start_s, end_s in waits)
            self._busy_s += ended_s - begun_s
            self._durations_s.append(ended_s - begun_s)
            self._ring_wait_s += ring_wait_s
            detail = {**task_detail(self.plan, task, engine.rank), "ring_wait_s": ring_wait_s}
            engine.record("task", begun_s, ended_s, self.index, **detail)
            for start_s, end_s in waits:
                if end_s - start_s > SEEN_S:
                    engine.record("ring wait", start_s, end_s, self.index)
        self._unread.clear()

    def reduce_gradients(self) -> float:
        """Sum gradients over all ranks and clip them; returns their global norm before clipping.

        `finish` does this; call it before only to look at the gradients.

        Raises:
            RunError: a micro-batch has not had its backward.
        """
        left = len(self._coming) + len(self._running)
        if left:
            raise RunError(
                f"step {self.index} ends with {left} micro-batches that had no backward",
                "Call step.backward for every micro-batch; other ranks wait for its ring messages.",
            )
        if self._grad_norm is None:
            engine = self._engine
            tell("summing gradients", self.index)
            work_ended = self._clock.mark()
            with peers_in_reach("the gradient reduction"):
                engine.sharding.reduce()
                self._grad_norm = clip_gradients(engine.model.parameters(), engine.clip_norm or math.inf)
            now_s = time.perf_counter()  # the norm is on the host, so all before it is done
            self._read_tasks()
            self._work_ended_s = self._clock.read_s(work_ended)
            self._reduce_s = now_s - self._work_ended_s
            engine.record("reduce", self._work_ended_s, now_s, self.index)
        return self._grad_norm

    def finish(self) -> StepReport:
        """Reduce, clip, step the optimizer, and say what happened. Called once, on all ranks.

        Raises:
            LossError: loss or gradient is not finite and `on_bad_loss` is "stop"; weights are untouched.
            RunError: a second call.
        """
        if self._finished:
            raise RunError(f"step {self.index} was finished twice", "Call step.finish() once a step.")
        engine = self._engine
        grad_norm = self.reduce_gradients()
        rows = all_gather_rows(self._row(), "the end of a step")
        loss = float(rows[:, 0].sum()) / self.supervised_tokens
        skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
        if skipped:
            self._refuse(loss, grad_norm)
        before_s = time.perf_counter()
        if not skipped:
            engine.optimizer.step()
        engine.optimizer.zero_grad()
        end_s = time.perf_counter()
        engine.record("optimizer", before_s, end_s, self.index)
        self._finished = True
        durations_s, stop = rows[:, _NUMBERS:].tolist(), bool(rows[:, _NUMBERS - 1].any())
        engine._step_finished(self.plan, durations_s, skipped=skipped, stop=stop)
        report = self._report(None if skipped else (loss, grad_norm), rows)
        return replace(report, optimizer_s=end_s - before_s, step_s=end_s - self._begun_s)

    def _row(self) -> Tensor:
        """What the others must know of this rank's step: numbers for `_report`, then durations of tasks."""
        prepared = self._prepared
        row = [
            float(self.loss_sum),
            self._busy_s,
            self._work_ended_s - self._work_begun_s,
            prepared.plan_wait_s + prepared.data_wait_s,
            prepared.plan_wait_s,
            prepared.data_wait_s,
            self._ring_wait_s,
            self._reduce_s,
            self._work_begun_s - self._begun_s,
            float(self._engine.stop_asked()),
        ]
        most_tasks = max(len(self.plan.tasks_of(rank)) for rank in range(self.plan.cluster.ranks))
        row += self._durations_s + [math.nan] * (most_tasks - len(self._durations_s))
        return torch.tensor(row, dtype=torch.float64, device=collective_device())

    def _refuse(self, loss: float, grad_norm: float) -> None:
        """Say which samples gave a loss or gradient that is not finite; all ranks call it."""
        engine = self._engine
        ids = [sample.id for sample in self.plan.samples]
        bad = {i for sample_ids, part in self._task_losses if not bool(part.isfinite()) for i in sample_ids}
        mine = torch.tensor([i in bad for i in ids], dtype=torch.int64, device=collective_device())
        told = all_gather_rows(mine, "a loss that is not finite").any(dim=0).tolist()
        names = [
            engine.sample_name(i) for i, is_bad in zip(ids, told, strict=True) if is_bad or not any(told)
        ]
        where = "it comes from tasks with the samples" if any(told) else "its samples are"
        cause = f"step {self.index} has loss {loss} and gradient norm {grad_norm}; {where} {', '.join(names)}"
        if engine.on_bad_loss == "stop":
            raise LossError(
                cause,
                "The weights were not changed. Look at these samples, lower the learning rate, or skip such "
                'steps (run.on_bad_loss = "skip").',
            )
        if engine.rank == 0:
            engine.notify(f"{cause}; it was skipped and no weight was changed")

    def _report(self, trained: tuple[float, float] | None, rows: Tensor) -> StepReport:
        loss, grad_norm = trained or (None, None)
        numbers = rows[:, :_NUMBERS].cpu().unbind(1)
        _, busy, measured, exposed, plan_wait, data_wait, ring_wait, reduce, opening, _ = numbers
        measured_s, exposed_s = float(measured.max()), float(exposed.max())
        idle = [max(0.0, 1.0 - float(b) / measured_s) if measured_s > 0 else 0.0 for b in busy]
        samples = self.plan.samples
        return StepReport(
            step=self.index,
            loss=loss,
            grad_norm=grad_norm,
            tokens=self._tokens,
            supervised_tokens=self.supervised_tokens,
            degrees=self.plan.degrees,
            predicted_s=self.plan.step_s,
            bound_s=self.plan.bound_s,
            measured_s=measured_s,
            step_s=0.0,  # it is not over
            plan_s=self._prepared.plan_s,
            exposed_s=exposed_s,
            plan_wait_s=float(plan_wait.max()),
            data_wait_s=float(data_wait.max()),
            idle_share=sum(idle) / len(idle),
            pairs=sum(sample.attended_pairs for sample in samples),
            longest_tokens=max(sample.tokens for sample in samples),
            alone_s=self.plan.alone_s,
            predicted_idle_share=self.plan.idle_share,
            gather_s=max(0.0, float(opening.min()) - exposed_s),
            ring_wait_s=float(ring_wait.mean()),
            reduce_s=float(reduce.min()),
            idle_shares=tuple(round(share, 4) for share in idle),
            skipped=trained is None,
            plan_factors=self._engine.plan_factors(self.index),
        )


def loss_sum_of(output: Any, micro: MicroBatch) -> Tensor:
    """The sum of token losses that a model's output stands for; see `Step.backward`."""
    value: Tensor = output if isinstance(output, Tensor) else output.logits
    return value if value.dim() == 0 else token_loss_sum(value, micro.labels)


def _check_attention_ran(micro: MicroBatch) -> None:
    """A model that drops the keyword attends inside its local rows only: wrong, and nothing would show it."""
    if micro.inputs["flexcp"].calls == 0:
        raise UnsupportedError(
            "the model ran without FlexCP attention",
            "Wrap the loop in `with flexcp.transformers.enable(model)`, or call flexcp.group_attention "
            "with the keyword `flexcp` in your own attention layer.",
        )
