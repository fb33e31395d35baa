"""Runs one kind of task at a time, forward and backward, through the parts that training uses.

On a CPU, where ranks share cores, time is what the process spent on cores: waiting for a peer that had no
core is not the task's. On an accelerator it is wall time.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from flexcp.attention import Message
from flexcp.core.cluster import Cluster
from flexcp.core.errors import InputError
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import Sample
from flexcp.cost.fit import fit_link
from flexcp.cost.model import Link, Load
from flexcp.profiler.alone import AloneTransport
from flexcp.runtime.batches import make_micro_batch
from flexcp.runtime.collectives import all_gather_rows, collective_device
from flexcp.runtime.launch import World
from flexcp.runtime.step import loss_sum_of
from flexcp.runtime.transport import Transport

_MESSAGE_BYTES = (1 << 12, 1 << 18, 1 << 20)  # and the longest of a ring
_MESSAGE_REPEATS = 9
_LEAST_GROWTH_BYTES = 2**24  # below, the allocator's own ups and downs show


@dataclass(frozen=True, slots=True)
class Pack:
    """What a task runs: samples, and on how many ranks."""

    samples: tuple[Sample, ...]
    degree: int
    whole_below_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def load(self) -> Load:
        """What the time formula sees of it."""
        return Load.of_pack(self.samples, self.whole_below_tokens)


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of task: `samples` sequences of about equal length, `tokens` in all, on groups of `degree`.

    Attributes:
        spans: the middle half of every sample attends both ways, as an image would.
        whole: samples are not cut, so each stays on one rank of its group.
    """

    tokens: int
    samples: int
    degree: int
    spans: bool = False
    whole: bool = False

    @property
    def pack(self) -> Pack:
        """Lengths differ by one at most; none is cut, or all."""
        share, rest = divmod(self.tokens, self.samples)
        lengths = [share + (index < rest) for index in range(self.samples)]
        samples = tuple(
            Sample(index, tokens, ((tokens // 4, tokens - tokens // 4),) if self.spans else ())
            for index, tokens in enumerate(lengths)
        )
        return Pack(samples, self.degree, self.tokens + 1 if self.whole else 0)


class Bench:
    """One rank's side of the measurements; all ranks call the same methods in the same order.

    Args:
        model: takes `input_ids`, `position_ids` and `flexcp`, with FlexCP attention on.
        vocab: ids are drawn below it.
        world: this rank.
        cast: dtype of the computation under autocast; None for that of the weights.
    """

    def __init__(self, model: nn.Module, vocab: int, world: World, cast: torch.dtype | None = None) -> None:
        self._model, self._vocab, self._world, self._cast = model, vocab, world, cast
        self._transport: Any = Transport() if world.size > 1 else AloneTransport()
        self._random = np.random.default_rng(world.rank)

    @property
    def clock(self) -> str:
        """`cpu` or `wall`, see the module."""
        return "cpu" if self._world.device.type == "cpu" else "wall"

    def seconds(self, pack: Pack) -> float:
        """Run a pack in every group that the ranks can form; NaN on a rank that is left over.

        A rank alone runs the part of one member, whatever the degree, and no message travels.
        """
        plan = _plan(pack, self._world.size if self._world.size > 1 else pack.degree)
        mine = plan.tasks_of(self._world.rank)
        dist.barrier()
        if not mine:
            return math.nan
        task = plan.tasks[mine[0]]
        ids = {
            place: self._random.integers(0, self._vocab, plan.samples[place].tokens) for place in task.samples
        }
        examples = {place: {"input_ids": values} for place, values in ids.items()}
        micro = make_micro_batch(plan, task, examples, self._transport).to(self._world.device)
        device = self._world.device.type
        begun_s = self._now_s()
        with torch.autocast(device, self._cast, enabled=self._cast is not None):
            output = self._model(**micro.inputs)
        (loss_sum_of(output, micro) / pack.tokens).backward()  # type: ignore[no-untyped-call]
        seconds = self._now_s() - begun_s
        # Gradients stay allocated, as between the tasks of a step: adding to them is part of a task.
        self._model.zero_grad(set_to_none=False)
        return seconds

    def link(self, longest_bytes: int, *, across: bool = False) -> Link:
        """Bandwidth and latency of messages by the transport of the rings.

        To the next rank of the node, or to the same place in the next node.

        Args:
            longest_bytes: of a message of a ring; bandwidth counts there.
            across: between nodes.
        """
        sizes = (*_MESSAGE_BYTES, max(longest_bytes, 4 * _MESSAGE_BYTES[-1]))
        return fit_link(sizes, [self._message_s(size, across) for size in sizes])

    def _message_s(self, message_bytes: int, across: bool) -> float:
        rank, local = self._world.rank, self._world.local_size
        ranks, node = range(self._world.size), rank // local * local
        exchange = self._transport.exchange(ranks)
        if across:
            following, previous = (rank + local) % len(ranks), (rank - local) % len(ranks)
        else:
            following, previous = (node + (rank - node + step) % local for step in (1, -1))
        leaving, arriving = (
            Message.zeros((message_bytes,), torch.uint8, self._world.device) for _ in range(2)
        )
        times = []
        for _ in range(_MESSAGE_REPEATS):
            dist.barrier()
            begun_s = self._now_s()
            exchange.post([(leaving, following)], [(arriving, previous)]).wait()
            times.append(self._now_s() - begun_s)
        return of_all_ranks([times], self.clock, collective_device())[0]

    def _now_s(self) -> float:
        if self._world.device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize()
        return time.perf_counter()

    def peak_bytes(self) -> int:
        """The most memory that this process has held so far: allocated on its device, or resident."""
        if self._world.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated())
        return _peak_resident_bytes()


def of_all_ranks(times: Sequence[Sequence[float]], clock: str, device: torch.device) -> list[float]:
    """One time a row, the same on all ranks: the median of its repetitions.

    Of one repetition, the mean of the ranks' times on cores; or the longest wall time, as a group is as slow
    as its slowest member.

    Args:
        times: one row a task, one entry a repetition; NaN where this rank had no part.
        clock: see `Bench.clock`.
        device: of the collective.
    """
    mine = torch.tensor(np.array(times), dtype=torch.float64, device=device)
    ranks = all_gather_rows(mine, "profiling").cpu().numpy()
    combined = np.nanmean(ranks, axis=0) if clock == "cpu" else np.nanmax(ranks, axis=0)
    return [float(seconds) for seconds in np.median(combined, axis=1)]


def _peak_resident_bytes() -> int:
    """Of this program alone: what `getrusage` says on Linux includes the process that started it."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _plan(pack: Pack, ranks: int) -> Plan:
    """As many groups side by side as there are ranks for, as in training; each has a pack of its own."""
    groups, size = ranks // pack.degree, len(pack.samples)
    if not groups:
        raise InputError(
            f"degree {pack.degree} needs more than the {ranks} ranks there are", "Launch more ranks."
        )
    samples = tuple(
        replace(sample, id=group * size + index)
        for group in range(groups)
        for index, sample in enumerate(pack.samples)
    )
    tasks = tuple(
        Task(
            samples=tuple(range(group * size, (group + 1) * size)),
            ranks=tuple(range(group * pack.degree, (group + 1) * pack.degree)),
            wave=0,
            start_s=0.0,
            end_s=0.0,
        )
        for group in range(groups)
    )
    cluster = Cluster(ranks, pack.tokens)
    return Plan("profile", "free-running", cluster, pack.whole_below_tokens, samples, tasks, 0.0)


def device_name(device: torch.device) -> str:
    """What the device calls itself; a calibration is for this device alone."""
    if device.type != "cpu":
        module: Any = torch.get_device_module(device)
        return f"{device.type}: {module.get_device_name(device)}"
    return f"cpu: {_processor()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(world: World) -> int:
    """Memory of one rank: of its device, or its share of the machine's."""
    if world.device.type != "cpu":
        module: Any = torch.get_device_module(world.device)
        return int(module.mem_get_info(world.device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.local_size


def growth_per_token(tokens: Sequence[int], peaks: Sequence[int]) -> float | None:
    """Bytes by which the peak grew per token, from the longest task but one to the longest.

    None where it hardly grew: small tasks hide below what the process had held before.

    >>> growth_per_token([100, 200, 400], [5_000_000, 5_000_000, 45_000_000])
    200000.0
    """
    if len(tokens) < 2:
        return None
    growth = peaks[-1] - peaks[-2]
    return growth / (tokens[-1] - tokens[-2]) if growth > _LEAST_GROWTH_BYTES else None
