"""Plans ahead of the step: rank 0 plans in the background, every rank gets the same plan.

Nothing here depends on how long planning takes, so runs stay reproducible.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexcp.core.errors import DisagreementError, error_from_json, error_to_json
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.runtime.collectives import all_gather_rows, broadcast_text, collective_device, raise_first

PlanFunction = Callable[[Sequence[Sample]], Plan]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and what it cost.

    Attributes:
        plan_s: seconds that rank 0 spent planning, hidden or not.
        waited_s: seconds of it that this rank had to wait for, the broadcast included.
    """

    plan: Plan
    plan_s: float
    waited_s: float


class PlanFeed:
    """Plans of coming global batches.

    `prepare(samples)` starts planning on rank 0 and returns at once; `receive()` hands the oldest prepared
    plan to all ranks. Both are called by all ranks in the same order.
    """

    def __init__(self, planner: PlanFunction) -> None:
        self._planner = planner
        self._first = dist.get_rank() == 0
        self._pool = ThreadPoolExecutor(1, "flexcp-plan") if self._first else None
        self._pending: deque[Future[str]] = deque()

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Start planning one global batch."""
        if self._pool is not None:
            self._pending.append(self._pool.submit(_plan_to_message, self._planner, samples))

    def receive(self) -> PlannedStep:
        """The oldest prepared plan, on every rank.

        Raises:
            FlexCPError: planning failed; all ranks raise the same.
        """
        start_s = time.perf_counter()
        text = self._pending.popleft().result() if self._first else ""
        message = json.loads(broadcast_text(text, 0, "handing out the plan"))
        if "error" in message:
            raise error_from_json(message["error"])
        plan = Plan.from_json(message["plan"])
        return PlannedStep(plan, message["plan_s"], time.perf_counter() - start_s)

    def drop(self) -> None:
        """Forget what was prepared and not received."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """End the planning thread."""
        self.drop()
        if self._pool is not None:
            self._pool.shutdown()


def _plan_to_message(planner: PlanFunction, samples: Sequence[Sample]) -> str:
    start_s = time.perf_counter()
    try:
        plan = planner(samples)
    except Exception as error:  # the other ranks wait for this message, whatever went wrong
        return json.dumps({"error": error_to_json(error)})
    return json.dumps({"plan": plan.to_json(), "plan_s": time.perf_counter() - start_s})


def meet(plan: Plan, supervised_tokens: int, trouble: Exception | None) -> int:
    """The exchange that opens a step; returns the supervised tokens of the whole global batch.

    Args:
        plan: what this rank is about to run.
        supervised_tokens: of this rank's rows.
        trouble: why this rank cannot run it (its data could not be read).

    Raises:
        FlexCPError: the trouble of some rank, on all ranks alike, before any gradient.
        DisagreementError: ranks hold different plans; they are named.
    """
    what = "the opening of a step"
    digest = int(plan.digest[:15], 16)
    mine = [supervised_tokens, digest, trouble is not None]
    rows = all_gather_rows(torch.tensor(mine, dtype=torch.int64, device=collective_device()), what)
    raise_first(rows[:, 2], trouble, what)
    others = [rank for rank, row in enumerate(rows.tolist()) if row[1] != digest]
    if others:
        raise DisagreementError(
            f"rank {dist.get_rank()} and ranks {others} hold different plans",
            "All ranks must run the same version of FlexCP with the same configuration.",
        )
    return int(rows[:, 0].sum())
