"""From a task of the plan to the tensors that one rank feeds its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.core.cluster import Cluster
from flexcp.core.errors import ConfigError, DataError, FlexCPError, SampleTooLongError, summary_of
from flexcp.core.layout import Layout, Piece
from flexcp.core.plan import Plan, Task
from flexcp.core.sample import IGNORE_INDEX, Sample
from flexcp.runtime.loss import shift_labels
from flexcp.runtime.transport import GroupExchange, Transport

Example = Mapping[str, Any]

_TOKENS = ("input_ids", "labels")  # cut by rows; everything else goes along whole


class Dataset(Protocol):
    """Map-style training data whose lengths are known before decoding.

    `dataset[i]` holds `input_ids` [L] and, optionally, `labels` [L]: unshifted, -100 where a token is not
    a target; without them every token is supervised. Whatever else it holds (images, weights, masks) goes
    along as `MicroBatch.extras`. A method `name(i)` is used in messages if there is one. A method
    `sample(i)` gives the `Sample` as the planner is to see it, with spans and encoder work, where there
    are images; nothing may be decoded for it.

    Samples are read in a background thread: random numbers for them should come from a generator of the
    data set's own, and depend on `i` alone.
    """

    @property
    def lengths(self) -> Sequence[int] | NDArray[np.int64]:
        """Tokens of every sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@runtime_checkable
class Stream(Protocol):
    """Training data in an order of its own, whose lengths are known only after decoding.

    Every rank walks all records and decodes its share of them, so `records` should be cheap and `decode`
    may be dear. A method `name(i)`, i the position in the stream, is used in messages if there is one.
    """

    def records(self, start: int, /) -> Iterator[Any]:
        """Records from position `start` on, the same on every rank and every call; their end ends the run.

        Compared across ranks by value: numbers, text, bytes, paths, arrays, and lists, mappings and
        dataclasses of them; of other objects only the kind.
        """

    def decode(self, record: Any, /) -> Example:
        """One sample, as `Dataset.__getitem__` gives it."""


class TaskContext:
    """What attention must know of the running task; travels through the model as a keyword.

    It is captured by the call, so activation recomputation and late backward passes see their own task.
    Not a dataclass: FSDP2 copies those, to cast what is in them, and `calls` would be counted on a copy.

    Attributes:
        layout: where every row of the pack lies.
        exchange: messages to the other ranks of the group.
        padding_rows: rows at the end of the local tensors that belong to no sample (see `make_micro_batch`).
        examples: what the data set holds, whole, of every sample of which this rank has a row; by its place
            in the pack. Models need it that look at more than the rows they are given (images).
        calls: times that attention ran under this task; 0 after a forward means that the model ignored it.
        auxiliary_sum: this rank's share of a loss that is not of single targets (balance of experts), each
            sample's times its tokens; None if there is none. A step adds it, over all its tokens.
    """

    __slots__ = ("auxiliary_sum", "calls", "examples", "exchange", "layout", "padding_rows")

    def __init__(
        self,
        layout: Layout,
        exchange: GroupExchange,
        padding_rows: int,
        examples: Mapping[int, Example] | None = None,
    ) -> None:
        self.layout = layout
        self.exchange = exchange
        self.padding_rows = padding_rows
        self.examples = examples or {}
        self.calls = 0
        self.auxiliary_sum: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of one task.

    Attributes:
        task: the task of the plan.
        inputs: keywords for the model: `input_ids` [1, T], `position_ids` [1, T] (of the uncut sample), and
            `flexcp` (a `TaskContext`).
        labels: [T], shifted before the sample was cut; -100 where there is no target.
        supervised_tokens: targets among them.
        sample_ids: indices in the data set (positions in the stream) of the samples of the task.
        extras: for each of them what its example holds beside tokens and labels, untouched; empty where
            this rank holds no row of the sample.
        pieces: which rows these are, in order: `Piece.index` counts the samples of the task. One row of
            padding without a piece stands where a rank has no row at all.
    """

    task: Task
    inputs: dict[str, Any]
    labels: Tensor
    supervised_tokens: int
    sample_ids: tuple[int, ...]
    extras: tuple[Mapping[str, Any], ...]
    pieces: tuple[Piece, ...]

    def to(self, device: torch.device) -> MicroBatch:
        """The same with inputs and labels on a device; itself if they are there. Extras stay."""
        if self.labels.device == device:
            return self
        inputs = {key: _moved(value, device) for key, value in self.inputs.items()}
        return replace(self, inputs=inputs, labels=_moved(self.labels, device))


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def sample_name(dataset: Dataset | Stream, index: int) -> str:
    """What to call a sample in a message: the data set's own `name(index)`, if it has one."""
    name = getattr(dataset, "name", None)
    return str(name(index)) if callable(name) else f"sample {index}"


def planned_sample(dataset: Dataset, index: int) -> Sample:
    """A sample as the planner sees it: the data set's own `sample(index)`, if it has one.

    Raises:
        DataError: the data set contradicts its own lengths.
    """
    tokens = int(dataset.lengths[index])
    own = getattr(dataset, "sample", None)
    sample: Sample = own(index) if callable(own) else Sample(index, tokens)
    if (sample.id, sample.tokens) != (index, tokens):
        raise DataError(
            f"the data set's sample({index}) is sample {sample.id} of {sample.tokens} tokens; "
            f"by its lengths it has {tokens}",
            "Both must say the same.",
        )
    return sample


def check_fits(dataset: Dataset | Stream, cluster: Cluster, global_batch: int) -> None:
    """Refuse data that cannot be trained on, as far as their lengths tell; those of a stream are not known.

    Raises:
        ConfigError: the global batch is empty.
        DataError: the data set is, or it is no data set.
        SampleTooLongError: the longest sample needs more ranks than there are.
    """
    if global_batch < 1:
        raise ConfigError(f"global_batch is {global_batch}", "A step needs at least one sample.")
    if isinstance(dataset, Stream):
        return
    missing = [name for name in ("lengths", "__len__", "__getitem__") if not hasattr(dataset, name)]
    if missing:
        raise DataError(
            f"a {type(dataset).__name__} has no {' and no '.join(missing)}",
            "Map-style data have lengths (tokens of every sample), __len__, and __getitem__, which gives a "
            'dict with "input_ids"; a stream has records and decode.',
        )
    if len(dataset) == 0:
        raise DataError("the data set is empty", "Give at least one sample.")
    longest = int(np.argmax(dataset.lengths))
    tokens = int(dataset.lengths[longest])
    if tokens > cluster.capacity_tokens:
        raise SampleTooLongError(
            sample_name(dataset, longest), tokens, cluster.tokens_per_rank, cluster.ranks
        )


def rank_samples(plan: Plan, rank: int) -> set[int]:
    """Positions in the global batch of the samples of which `rank` holds at least one row."""
    held: set[int] = set()
    for index in plan.tasks_of(rank):
        task = plan.tasks[index]
        pieces = plan.layout(task).pieces(task.ranks.index(rank))
        held.update(task.samples[piece.index] for piece in pieces)
    return held


def load_examples(dataset: Dataset, plan: Plan, rank: int) -> dict[int, Example]:
    """Read what `rank` needs for its step, and nothing else; keys are positions in the global batch.

    Raises:
        DataError: a sample cannot be read, has another length than its plan was made with, or labels of
            another length.
    """
    examples = {}
    for position in sorted(rank_samples(plan, rank)):
        sample = plan.samples[position]
        try:
            example = dataset[sample.id]
            tokens = count_tokens(example)
        except Exception as error:
            raise reading_failed(dataset, sample.id, rank, error) from error
        if tokens != sample.tokens:
            raise DataError(
                f"{sample_name(dataset, sample.id)} has {tokens} tokens, its length was {sample.tokens}",
                "The data changed after its lengths were taken; rebuild the length index.",
            )
        examples[position] = example
    return examples


def count_tokens(example: Example) -> int:
    """Of a sample.

    Raises:
        DataError: it has more or fewer labels, or anything but one whole number for each.
    """
    tokens = _count(example["input_ids"], "input_ids", ())
    labels = _count(example["labels"], "labels", (IGNORE_INDEX,)) if "labels" in example else tokens
    if tokens and labels != tokens:
        raise DataError(
            f"it has {tokens} tokens and {labels} labels",
            "Give a label for every token (-100 where there is no target), unshifted: FlexCP shifts them.",
        )
    return tokens


def _count(values: Any, name: str, negative: tuple[int, ...]) -> int:
    numbers = np.asarray(values)
    if numbers.size == 0:
        return 0
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise DataError(
            f"its {name} are {numbers.dtype} of shape {list(numbers.shape)}", "Give one whole number a token."
        )
    wrong = numbers[(numbers < 0) & ~np.isin(numbers, negative)]
    if wrong.size:
        raise DataError(f"its {name} hold {int(wrong[0])}", "Ids of tokens are 0 or more.")
    return len(numbers)


def reading_failed(dataset: Dataset | Stream, index: int, rank: int, error: Exception) -> DataError:
    """The sentence that ends all ranks when one of them cannot read a sample."""
    cause, remedy = summary_of(error), ""
    if isinstance(error, FlexCPError):
        cause, remedy = error.cause, error.remedy
    return DataError(
        f"rank {rank} could not read {sample_name(dataset, index)}: {cause}",
        remedy or "Repair the sample or leave it out.",
    )


def make_micro_batch(
    plan: Plan, task: Task, examples: Mapping[int, Example], transport: Transport, *, pinned: bool = False
) -> MicroBatch:
    """Cut this rank's rows out of its samples.

    A member that holds no row at all (a pack shorter than its group) gets one padding row, because models
    do not survive empty tensors; attention leaves it out and it supervises nothing.

    Args:
        plan: of the global batch.
        task: one that this rank runs.
        examples: by position in the global batch.
        transport: of this rank.
        pinned: whether the tensors lie where an accelerator can copy them from while it computes.
    """
    member = task.ranks.index(transport.rank)
    layout = plan.layout(task)
    ids: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    for piece in layout.pieces(member):
        example = examples[task.samples[piece.index]]
        rows = slice(piece.start, piece.stop)
        tokens = np.asarray(example["input_ids"], dtype=np.int64)
        ids.append(tokens[rows])
        positions.append(np.arange(piece.start, piece.stop))
        labels.append(shift_labels(np.asarray(example.get("labels", tokens), dtype=np.int64))[rows])
    padding_rows = 0 if ids else 1
    if padding_rows:
        ids, positions, labels = [np.zeros(1, int)], [np.zeros(1, int)], [np.full(1, IGNORE_INDEX)]
    targets = np.concatenate(labels)
    held = {piece.index: examples[task.samples[piece.index]] for piece in layout.pieces(member)}
    exchange = transport.exchange(task.ranks, task.exchange)
    return MicroBatch(
        task=task,
        inputs={
            "input_ids": _tensor(np.concatenate(ids), pinned)[None],
            "position_ids": _tensor(np.concatenate(positions), pinned)[None],
            "flexcp": TaskContext(layout, exchange, padding_rows, held),
        },
        labels=_tensor(targets, pinned),
        supervised_tokens=int((targets != IGNORE_INDEX).sum()),
        sample_ids=tuple(plan.samples[position].id for position in task.samples),
        extras=tuple(_extras(examples.get(position, {})) for position in task.samples),
        pieces=layout.pieces(member),
    )


def _extras(example: Example) -> Example:
    return {key: value for key, value in example.items() if key not in _TOKENS}


def _tensor(rows: NDArray[np.int64], pinned: bool) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(rows))
    return tensor.pin_memory() if pinned else tensor
