"""What all ranks say to each other outside of rings: small, and in a sentence when a peer is gone.

Text and numbers only; nothing that arrives is unpickled. Every group is one of all ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.core.errors import FlexCPError, RankFailedError, error_from_json, error_to_json

Answer = TypeVar("Answer")
Group = dist.ProcessGroup | None  # None: all ranks, over the group made at start

_KEEP_ALIVE_S = 5.0


@contextmanager
def peers_in_reach(what: str) -> Iterator[None]:
    """Turns the backend's error about a lost peer into a sentence; memory that ran out is this rank's own.

    Raises:
        RankFailedError: a collective inside the block failed.
    """
    try:
        yield
    except FlexCPError:
        raise
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise RankFailedError(
            f"rank {dist.get_rank()} lost another rank during {what}: {str(error).splitlines()[0]}",
            "Another rank has ended or stalled; its own output says why.",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device had no memory left; torch's allocator of the host only says so in words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def all_gather_rows(mine: Tensor, what: str, group: Group = None) -> Tensor:
    """[N, len(mine)]: one row of every rank, on every rank; `mine` is on the device of the backend."""
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with peers_in_reach(what):
        dist.all_gather(rows, mine, group=group)
    return torch.stack(rows)


def ranks_of_a_node(local_size: int) -> int:
    """Ranks that share a machine, on all ranks: of the largest, if machines have different numbers."""
    mine = torch.tensor([local_size], device=collective_device())
    return int(all_gather_rows(mine, "counting the ranks of a node").max())


def broadcast_text(text: str, source: int, what: str, group: Group = None) -> str:
    """Text of rank `source` on every rank; what other ranks pass is ignored."""
    device = collective_device(group)
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], device=device)
    with peers_in_reach(what):
        dist.broadcast(size, source, group=group)
        received = data if dist.get_rank() == source else data.new_empty(int(size.item()))
        dist.broadcast(received, source, group=group)
    return bytes(received.cpu().numpy()).decode()


def raise_together(trouble: BaseException | None, what: str) -> None:
    """If any rank has trouble, all ranks raise the trouble of the first of them.

    Raises:
        FlexCPError: of the same kind on every rank; the rank is named unless all ranks had trouble.
    """
    has_trouble = torch.tensor([trouble is not None], dtype=torch.int64, device=collective_device())
    raise_first(all_gather_rows(has_trouble, what)[:, 0], trouble, what)


@contextmanager
def alike(what: str) -> Iterator[None]:
    """What fails in the block on one rank fails on all; all ranks enter it, and inside they do not meet.

    Raises:
        FlexCPError: see `raise_together`.
    """
    trouble: Exception | None = None
    try:
        yield
    except Exception as error:
        trouble = error
    raise_together(trouble, what)


def raise_first(has_trouble: Tensor, trouble: BaseException | None, what: str, group: Group = None) -> None:
    """The second half of `raise_together`, for who has gathered the flags [N] along with other numbers."""
    troubled = has_trouble.nonzero()[:, 0].tolist()
    if troubled:
        mine = error_to_json(trouble) if trouble is not None else ""
        error = error_from_json(broadcast_text(mine, troubled[0], what, group))
        if len(troubled) < dist.get_world_size():
            error.add_note(f"raised by rank {troubled[0]}")
        raise error from trouble


def on_first_rank(work: Callable[[], Answer], what: str) -> Answer | None:
    """Run `work` on rank 0 while the others wait, however long it takes; rank 0 gets its result.

    A plain barrier would run into the timeout of collectives on a long job.

    Raises:
        FlexCPError: what `work` raised, of the same kind on all ranks.
    """
    if dist.get_rank() != 0:
        while (state := broadcast_text("", 0, what)) == "working":
            pass
        if state != "done":
            raise error_from_json(state)
        return None
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        while not future.done():
            futures.wait([future], timeout=_KEEP_ALIVE_S)
            if not future.done():
                broadcast_text("working", 0, what)
        error = future.exception()
        if error is None:
            broadcast_text("done", 0, what)
            return future.result()
        raise error_from_json(broadcast_text(error_to_json(error), 0, what)) from error


def collective_device(group: Group = None) -> torch.device:
    """Where tensors of collectives live: the CPU under gloo, else this rank's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if dist.get_backend(group) == "gloo" or accelerator is None else accelerator


def first_difference(values: dict[str, str]) -> tuple[str, list[int]] | None:
    """Name of the first value that is not the same on all ranks, and the ranks that differ from rank 0.

    The names must be the same on all ranks, or gloo ends the process.
    """
    hashes = [_hash(json.dumps([name, value])) for name, value in values.items()]
    mine = torch.tensor(hashes, dtype=torch.int64, device=collective_device())
    rows = all_gather_rows(mine, "comparing the ranks' configurations")
    for column, name in enumerate(values):
        others = (rows[:, column] != rows[0, column]).nonzero()[:, 0].tolist()
        if others:
            return name, others
    return None


def _hash(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
