"""What the coming steps need, made ready behind the running one: two plans ahead, the data of one.

Each rank has one background thread, and the threads talk over a process group of their own on the host, so
that nothing they say queues behind rings or gradient reductions. All ranks give their thread the same work
in the same order.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flexcp.core.errors import RankFailedError, error_from_json, error_to_json
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.runtime.batches import Example, MicroBatch, make_micro_batch
from flexcp.runtime.collectives import broadcast_text
from flexcp.runtime.planning import AnyPlanner, MadePlan, Notify, Planning
from flexcp.runtime.sources import Source
from flexcp.runtime.transport import Transport

Answer = TypeVar("Answer")
PlannerOf = Callable[[int], AnyPlanner]
Inspect = Callable[[Sequence[MicroBatch]], None]

_LATE_S = 5.0  # a shorter wait shows in the metrics alone


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that can run.

    Attributes:
        plan: the same on all ranks, as `digest`, the SHA-256 of the text that came, says.
        plan_s: seconds that rank 0 spent planning it, hidden or not.
        micro_batches: this rank's, on the host.
        trouble: why its data could not be read or run; the other ranks must hear of it before anyone raises.
        plan_wait_s, data_wait_s: seconds that this rank waited for it when it was asked for.
    """

    plan: Plan
    digest: str
    plan_s: float
    micro_batches: list[MicroBatch]
    trouble: Exception | None
    plan_wait_s: float
    data_wait_s: float

    @property
    def supervised_tokens(self) -> int:
        """Of this rank."""
        return sum(micro.supervised_tokens for micro in self.micro_batches)


class Feed:
    """The background of one rank; all ranks construct it at the same point.

    Args:
        planner: makes the plans, on rank 0.
        transport: what the micro-batches' rings will run over.
        device: where they will run; for an accelerator their tensors are pinned.
        notify: told on rank 0 what a user should know; called from a background thread.
        timeout_s: a rank that is silent for longer ends the feed.
    """

    def __init__(
        self,
        planner: AnyPlanner,
        transport: Transport,
        device: torch.device,
        notify: Notify,
        timeout_s: float,
    ) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.is_first = dist.get_rank() == 0
        self._planning = Planning(planner, notify) if self.is_first else None
        self.notify = notify
        self._transport = transport
        self._pinned = device.type != "cpu"
        self._thread = ThreadPoolExecutor(1, "flexcp-feed", initializer=_stay_on, initargs=(device,))

    def ahead(
        self,
        source: Source,
        step: int,
        what: str = "step",
        planner_of: PlannerOf | None = None,
        inspect: Inspect | None = None,
    ) -> Ahead:
        """Steps of a source from `step` on; all ranks ask for it at the same point.

        With `planner_of`, every step has a planner of its own, asked for when the step two before opens.
        What `inspect` raises of this rank's micro-batches is the trouble of their step.
        """
        return Ahead(self, source, step, what, planner_of, inspect)

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Run `work` in the background, after everything submitted before."""
        return self._thread.submit(work)

    def plan(self, samples: Sequence[Sample], planner: AnyPlanner | None) -> Future[MadePlan] | None:
        """Start planning, on rank 0, by another planner if one is given; other ranks wait for nothing."""
        return self._planning.submit(samples, planner) if self._planning is not None else None

    def no_plan(self, trouble: Exception) -> Future[MadePlan] | None:
        """In place of `plan`, where the samples are not known: what rank 0 hands out is the trouble."""
        if not self.is_first:
            return None
        failed: Future[MadePlan] = Future()
        failed.set_exception(trouble)
        return failed

    def hand_out(self, made: Future[MadePlan] | None) -> MadePlan:
        """The plan of rank 0, on every rank.

        Raises:
            FlexCPError: planning failed; all ranks raise the same.
        """
        head, _, text = broadcast_text(_message(made), 0, "handing out a plan", self.group).partition("\n")
        answer = json.loads(head)
        if "error" in answer:
            raise error_from_json(answer["error"])
        return MadePlan(text, answer["plan_s"])

    def micro_batches(self, plan: Plan, examples: Mapping[int, Example]) -> list[MicroBatch]:
        """This rank's share of every task that it runs."""
        rank = self._transport.rank
        return [
            make_micro_batch(plan, plan.tasks[index], examples, self._transport, pinned=self._pinned)
            for index in plan.tasks_of(rank)
        ]

    def close(self, wait: bool = True) -> None:
        """End thread and planner process; what the thread was given is finished: other ranks share in it.

        Args:
            wait: until it is finished.
        """
        if self._planning is not None:
            self._planning.close(wait)
        self._thread.shutdown(wait)


def _stay_on(device: torch.device) -> None:
    """A thread begins on the first device, where a data set's own code would allocate, for every rank."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


class Ahead:
    """The coming steps of one source, in order.

    While a step runs, the plan of the second one after it is made and the data of the next one are read; a
    stream must be read before it can be planned, so it is read as far as it is planned. Nothing is begun
    beyond that, which bounds the memory.
    """

    def __init__(
        self,
        feed: Feed,
        source: Source,
        step: int,
        what: str,
        planner_of: PlannerOf | None,
        inspect: Inspect | None,
    ) -> None:
        self._feed = feed
        self._planner_of = planner_of
        self._inspect = inspect
        self._what = what
        self._source = source
        self._step = step
        self._waits_for = "plan"
        self._planned_s = 0.0
        self._announced: deque[Future[_Announced | None]] = deque()
        self._announce(step)
        self._announce(step + 1)
        self._prepared = self._prepare()

    def take(self) -> Prepared | None:
        """The next step; None behind the last one. It also gets the steps after it on their way.

        Raises:
            FlexCPError: there is none, for a reason that all ranks have heard alike.
        """
        begun_s = time.perf_counter()
        self._wait(self._prepared)
        waited_s = time.perf_counter() - begun_s
        plan_wait_s = min(max(self._planned_s - begun_s, 0.0), waited_s)
        prepared = self._prepared.result()
        if prepared is not None:
            prepared = replace(prepared, plan_wait_s=plan_wait_s, data_wait_s=waited_s - plan_wait_s)
            self._announce(self._step + 2)
            self._prepared = self._prepare()
            self._step += 1
        return prepared

    def _wait(self, future: Future[Any]) -> None:
        done, _ = futures.wait([future], timeout=_LATE_S)
        if not done and self._feed.is_first:
            waited = f"{self._what} {self._step} has waited {_LATE_S:g} s"
            self._feed.notify(f"{waited} for its {self._waits_for}, and still waits")
        futures.wait([future])

    def _announce(self, step: int) -> None:
        planner = self._planner_of(step) if self._planner_of else None
        self._announced.append(self._feed.submit(partial(self._begin_plan, step, planner)))

    def _begin_plan(self, step: int, planner: AnyPlanner | None) -> _Announced | None:
        try:
            samples = self._source.samples(step)
        except RankFailedError:
            raise
        except Exception as error:  # a data set's own code: the others wait for this rank's part in the plan
            return _Announced(step, self._feed.no_plan(error), error)
        return _Announced(step, self._feed.plan(samples, planner)) if samples else None

    def _prepare(self) -> Future[Prepared | None]:
        return self._feed.submit(partial(self._read, self._announced.popleft()))

    def _read(self, announced: Future[_Announced | None]) -> Prepared | None:
        self._waits_for = "plan"
        begun = announced.result()
        if begun is None:
            return None
        made = self._feed.hand_out(begun.made)
        plan, digest = Plan.from_json(made.text), hashlib.sha256(made.text.encode()).hexdigest()
        self._planned_s = time.perf_counter()
        self._waits_for = "data"
        micro_batches: list[MicroBatch] = []
        trouble = begun.trouble
        try:
            if trouble is None:
                micro_batches = self._feed.micro_batches(plan, self._source.examples(begun.step, plan))
                if self._inspect is not None:
                    self._inspect(micro_batches)
        except Exception as error:
            trouble = error
        return Prepared(plan, digest, made.plan_s, micro_batches, trouble, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Announced:
    """A step whose samples are known, or why they are not; its plan comes on rank 0."""

    step: int
    made: Future[MadePlan] | None
    trouble: Exception | None = None


def _message(made: Future[MadePlan] | None) -> str:
    """What rank 0 says: a line about the plan, then the plan."""
    if made is None:
        return ""
    try:
        answer = made.result()
    except Exception as error:  # the other ranks wait for this message, whatever went wrong
        return json.dumps({"error": error_to_json(error)})
    return json.dumps({"plan_s": answer.plan_s}) + "\n" + answer.text
