"""Where the samples of a step come from: data with an index, or a stream.

Which samples make up a step depends on neither the number of ranks nor the plan. A stream is decoded once,
rank r decoding sample i where i mod N = r, and each sample then travels to the ranks that run it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import PurePath
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flexcp.core.errors import DataError, DisagreementError
from flexcp.core.plan import Plan
from flexcp.core.sample import Sample
from flexcp.runtime.batches import (
    Dataset,
    Example,
    Stream,
    count_tokens,
    load_examples,
    planned_sample,
    rank_samples,
    reading_failed,
)
from flexcp.runtime.collectives import all_gather_rows, peers_in_reach, raise_first
from flexcp.runtime.order import batch_indices
from flexcp.runtime.packets import example_of, packet_of


class Source(Protocol):
    """Samples step by step. The feed's thread calls both methods on all ranks, in the same order."""

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The global batch of a step; empty behind the last one. Steps ascend by one."""

    def examples(self, step: int, plan: Plan) -> dict[int, Example]:
        """What this rank needs, by position in the global batch; once for each step."""


class MapSource:
    """Map-style data: each rank reads what the plan gives it.

    Args:
        dataset: the data.
        indices: samples of a step; none behind the last one.
        rank: of the plan, that this process stands for.
    """

    def __init__(self, dataset: Dataset, indices: Callable[[int], Sequence[int]], rank: int) -> None:
        self._dataset = dataset
        self._indices = indices
        self._rank = rank

    def samples(self, step: int) -> tuple[Sample, ...]:
        """Lengths are known, so nothing is read.

        Raises:
            DataError: the data set cannot say what the planner is to see of one of them.
        """
        return tuple(self._sample(int(index)) for index in self._indices(step))

    def _sample(self, index: int) -> Sample:
        try:
            return planned_sample(self._dataset, index)
        except Exception as error:
            raise reading_failed(self._dataset, index, self._rank, error) from error

    def examples(self, step: int, plan: Plan) -> dict[int, Example]:
        """Read them; see `load_examples`."""
        return load_examples(self._dataset, plan, self._rank)


class StreamSource:
    """A stream: step k is records k·B to (k + 1)·B, so a resumed run needs only its step.

    Args:
        stream: the data.
        global_batch: B.
        steps: stop before this step; None for the end of the stream.
        group: of all ranks, on the host; lengths and samples travel over it.
    """

    def __init__(
        self, stream: Stream, global_batch: int, steps: int | None, group: dist.ProcessGroup
    ) -> None:
        self._stream = stream
        self._global_batch = global_batch
        self._steps = steps
        self._group = group
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._records: Iterator[Any] | None = None
        self._at = 0
        self._ended = False
        self._prints: list[int] = []  # of the records of the step that is read
        self._shares: dict[int, tuple[dict[int, Tensor], NDArray[np.int64]]] = {}

    def samples(self, step: int) -> tuple[Sample, ...]:
        """Decode this rank's share and gather all lengths.

        Raises:
            DataError: of the first rank that could not read, on all ranks.
            DisagreementError: ranks see different streams.
        """
        if self._ended or (self._steps is not None and step >= self._steps):
            return ()
        packets: dict[int, Tensor] = {}
        sizes = np.zeros((-(-self._global_batch // self._ranks), 2), dtype=np.int64)
        trouble: Exception | None = None
        try:
            for position, example in self._share(step):
                packets[position] = packet_of(example)
                sizes[position // self._ranks] = len(example["input_ids"]), len(packets[position])
        except Exception as error:
            self._records = None
            trouble = reading_failed(self._stream, self._at, self._rank, error)
        sizes = self._gather(step, sizes, trouble)
        self._shares[step] = packets, sizes[:, 1]
        first = step * self._global_batch
        return tuple(Sample(first + position, tokens) for position, (tokens, _) in enumerate(sizes.tolist()))

    def examples(self, step: int, plan: Plan) -> dict[int, Example]:
        """Samples from the ranks that decoded them to those that hold rows of them, whole."""
        packets, sizes = self._shares.pop(step)
        needed = [sorted(rank_samples(plan, rank)) for rank in range(self._ranks)]
        sent = [[packets[p] for p in positions if p in packets] for positions in needed]
        mine = sorted(needed[self._rank], key=lambda position: (position % self._ranks, position))
        received = torch.empty(int(sizes[mine].sum()), dtype=torch.uint8)
        with peers_in_reach("the exchange of samples"):
            dist.all_to_all_single(
                received,
                torch.cat([torch.empty(0, dtype=torch.uint8), *itertools.chain.from_iterable(sent)]),
                [
                    int(sizes[[p for p in mine if p % self._ranks == rank]].sum())
                    for rank in range(self._ranks)
                ],
                [sum(map(len, packets)) for packets in sent],
                group=self._group,
            )
        parts = torch.split(received, sizes[mine].tolist())
        return {position: example_of(part) for position, part in zip(mine, parts, strict=True)}

    def _share(self, step: int) -> Iterator[tuple[int, Example]]:
        """Samples that this rank decodes, by position in the global batch."""
        first = step * self._global_batch
        if self._records is None or self._at != first:
            self._at = first
            self._records = iter(self._stream.records(first))
        self._prints = []
        for record in itertools.islice(self._records, self._global_batch):
            position = self._at - first
            self._prints.append(record_print(record))
            if position % self._ranks == self._rank:
                example = self._stream.decode(record)
                if not count_tokens(example):
                    raise DataError("it has no tokens", "Leave such samples out of the stream.")
                yield position, example
            self._at += 1

    def _gather(self, step: int, mine: NDArray[np.int64], trouble: Exception | None) -> NDArray[np.int64]:
        """[samples of the step, 2]: tokens and bytes of all of them."""
        what = "gathering the lengths of a stream"
        seen = record_print(self._prints)
        row = torch.tensor([trouble is not None, seen, *mine.reshape(-1).tolist()], dtype=torch.int64)
        rows = all_gather_rows(row, what, self._group)
        raise_first(rows[:, 0], trouble, what, self._group)
        by_rank = rows[:, 2:].reshape(self._ranks, -1, 2)
        sizes: NDArray[np.int64] = by_rank.transpose(0, 1).reshape(-1, 2)[: self._global_batch].numpy()
        count = int((sizes[:, 0] > 0).sum())
        if not sizes[:count, 0].all():
            missing = int((sizes[:, 0] == 0).argmax())
            raise DisagreementError(
                f"the stream ended on rank {missing % self._ranks} and went on on another rank",
                "Stream.records must give the same records on every rank.",
            )
        if bool((rows[:, 1] != rows[0, 1]).any()):
            self._name_difference(step)
        self._ended = count < self._global_batch
        return sizes[:count]

    def _name_difference(self, step: int) -> NoReturn:
        """All ranks call it when they have seen different records; nothing was decoded wrongly yet."""
        prints = self._prints + [0] * (self._global_batch - len(self._prints))
        rows = all_gather_rows(torch.tensor(prints), "comparing the records of a stream", self._group)
        differs = rows != rows[0]
        position = int(differs.any(dim=0).to(torch.uint8).argmax())
        others = differs[:, position].nonzero()[:, 0].tolist()
        raise DisagreementError(
            f"ranks {others} have another record {step * self._global_batch + position} of the stream than "
            "rank 0",
            "Stream.records must give the same records in the same order on every rank: sort what a folder "
            "lists, seed what is shuffled.",
        )


def record_print(record: object) -> int:
    """A number that equal records share on all ranks; objects without a value are of their kind alone."""
    digest = hashlib.sha256()
    _add(digest, record)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def _add(digest: hashlib._Hash, value: object) -> None:
    """Into the digest; everything behind its kind and size, so that neighbours cannot run together."""
    parts: Iterable[object] = ()
    data = b""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if value is None or isinstance(value, bool | int | float | complex | str | PurePath):
        data = str(value).encode(errors="surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        data = value.tobytes()
    elif isinstance(value, Mapping):
        parts = itertools.chain.from_iterable(value.items())
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    size = len(value) if isinstance(value, Sized) else 1
    digest.update(f"{type(value).__name__} {len(data)} {size} ".encode())
    digest.update(data)
    for part in parts:
        _add(digest, part)


def training_source(
    dataset: Dataset | Stream, global_batch: int, seed: int, steps: int | None, group: dist.ProcessGroup
) -> Source:
    """Steps of a training run, up to `steps`; a stream may end before."""
    if isinstance(dataset, Stream):
        return StreamSource(dataset, global_batch, steps, group)
    return MapSource(dataset, shuffled(dataset, global_batch, seed, steps), dist.get_rank())


def shuffled(
    dataset: Dataset, global_batch: int, seed: int, steps: int | None
) -> Callable[[int], Sequence[int]]:
    """Samples of every step of a training run; none from `steps` on."""

    def indices(step: int) -> Sequence[int]:
        over = steps is not None and step >= steps
        chosen: list[int] = [] if over else batch_indices(len(dataset), global_batch, seed, step).tolist()
        return chosen

    return indices


def whole_source(dataset: Dataset | Stream, global_batch: int, group: dist.ProcessGroup) -> Source:
    """Every sample once, in order; the last batch may be smaller."""
    if isinstance(dataset, Stream):
        return StreamSource(dataset, global_batch, None, group)
    return MapSource(dataset, in_order(dataset, global_batch), dist.get_rank())


def in_order(dataset: Dataset, global_batch: int) -> Callable[[int], Sequence[int]]:
    """Samples of every batch of one pass over the data."""
    every = range(len(dataset))
    return lambda step: every[step * global_batch : (step + 1) * global_batch]
