"""Plans ahead of the step: rank 0 plans in the background, every rank gets the same plan.

Nothing here depends on how long planning takes, so runs stay reproducible.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.core.errors import DisagreementError, FlexCPError, RunError
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.runtime.transport import peers_in_reach

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

    def __init__(self, planner: PlanFunction, device: torch.device) -> None:
        self._planner = planner
        self._device = device
        self._rank = dist.get_rank()
        self._pool = ThreadPoolExecutor(1, "flexcp-plan") if self._rank == 0 else None
        self._pending: list[Future[str]] = []

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
        text = self._pending.pop(0).result() if self._rank == 0 else ""
        message = json.loads(broadcast_text(text, self._device, "handing out the plan"))
        if "cause" in message:
            raise RunError(f"planning failed: {message['cause']}", message["remedy"])
        plan = Plan.from_json(message["plan"])
        return PlannedStep(plan, message["plan_s"], time.perf_counter() - start_s)

    def drop(self) -> None:
        """Forget what was prepared and not received."""
        self._pending.clear()

    def close(self) -> None:
        """End the planning thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _plan_to_message(planner: PlanFunction, samples: Sequence[Sample]) -> str:
    start_s = time.perf_counter()
    try:
        plan = planner(samples)
    except FlexCPError as error:
        return json.dumps({"cause": error.cause, "remedy": error.remedy})
    return json.dumps({"plan": plan.to_json(), "plan_s": time.perf_counter() - start_s})


def broadcast_text(text: str, device: torch.device, what: str) -> str:
    """Text of rank 0 on every rank, of any length; bytes travel, nothing is unpickled."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    with peers_in_reach(what):
        dist.broadcast(size, 0)
        received = data if dist.get_rank() == 0 else data.new_empty(int(size.item()))
        dist.broadcast(received, 0)
    return bytes(received.cpu().numpy()).decode()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The one exchange that opens a step."""

    supervised_tokens: int
    """Of the whole global batch: the divisor of the loss."""


def meet(plan: Plan, supervised_tokens: int, device: torch.device) -> Meeting:
    """Add up supervised tokens and compare plan digests over all ranks.

    Raises:
        DisagreementError: some rank holds another plan; the ranks are named.
    """
    digest = int(plan.digest[:15], 16)
    mine = torch.tensor([supervised_tokens, digest], dtype=torch.int64, device=device)
    rows = all_gather_rows(mine, "the opening of a step")
    others = [rank for rank, row in enumerate(rows.tolist()) if row[1] != digest]
    if others:
        raise DisagreementError(
            f"rank {dist.get_rank()} and ranks {others} hold different plans",
            "All ranks must run the same version of FlexCP.",
        )
    return Meeting(int(rows[:, 0].sum()))


def all_gather_rows(mine: Tensor, what: str) -> Tensor:
    """[N, len(mine)]: one row of every rank, on every rank."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with peers_in_reach(what):
        dist.all_gather(rows, mine)
    return torch.stack(rows)
