"""From a task of the plan to the tensors that one rank feeds its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.core.errors import DataError
from flexcp.core.layout import Layout
from flexcp.core.plan import Plan, Task
from flexcp.runtime.loss import IGNORE_INDEX, shift_labels
from flexcp.runtime.transport import GroupExchange, Transport

Example = Mapping[str, Any]


class Dataset(Protocol):
    """Map-style training data whose lengths are known before decoding.

    `dataset[i]` holds `input_ids` [L] and, optionally, `labels` [L]: unshifted, -100 where a token is not
    a target; without them every token is supervised. A method `name(i)` is used in messages if there is one.
    """

    @property
    def lengths(self) -> Sequence[int] | NDArray[np.int64]:
        """Tokens of every sample."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


class TaskContext:
    """What attention must know of the running task; travels through the model as a keyword.

    It is captured by the call, so activation recomputation and late backward passes see their own task.
    Not a dataclass: FSDP2 copies those, to cast what is in them, and `calls` would be counted on a copy.

    Attributes:
        layout: where every row of the pack lies.
        exchange: messages to the other ranks of the group.
        padding_rows: rows at the end of the local tensors that belong to no sample (see `make_micro_batch`).
        calls: times that attention ran under this task; 0 after a forward means that the model ignored it.
    """

    __slots__ = ("calls", "exchange", "layout", "padding_rows")

    def __init__(self, layout: Layout, exchange: GroupExchange, padding_rows: int) -> None:
        self.layout = layout
        self.exchange = exchange
        self.padding_rows = padding_rows
        self.calls = 0


@dataclass(frozen=True)
class MicroBatch:
    """This rank's share of one task.

    Attributes:
        task: the task of the plan.
        inputs: keywords for the model: `input_ids` [1, T], `position_ids` [1, T] (of the uncut sample), and
            `flexcp` (a `TaskContext`).
        labels: [T], shifted before the sample was cut; -100 where there is no target.
        supervised_tokens: targets among them.
        sample_ids: indices in the data set of the samples of the task.
    """

    task: Task
    inputs: dict[str, Any]
    labels: Tensor
    supervised_tokens: int
    sample_ids: tuple[int, ...]


def sample_name(dataset: Dataset, index: int) -> str:
    """What to call a sample in a message: the data set's own `name(index)`, if it has one."""
    name = getattr(dataset, "name", None)
    return str(name(index)) if callable(name) else f"sample {index}"


def rank_samples(plan: Plan, rank: int) -> set[int]:
    """Positions in the global batch of the samples of which `rank` holds at least one row."""
    held: set[int] = set()
    for index in plan.tasks_of(rank):
        task = plan.tasks[index]
        pieces = plan.layout(task).pieces(task.ranks.index(rank))
        held.update(task.samples[piece.index] for piece in pieces)
    return held


def load_examples(dataset: Dataset, plan: Plan, rank: int) -> dict[int, Example]:
    """Read what `rank` needs for its step, and nothing else.

    Raises:
        DataError: a sample has another length than its plan was made with.
    """
    examples = {}
    for position in sorted(rank_samples(plan, rank)):
        sample = plan.samples[position]
        example = dataset[sample.id]
        if len(example["input_ids"]) != sample.tokens:
            raise DataError(
                f"{sample_name(dataset, sample.id)} has {len(example['input_ids'])} tokens, its length was "
                f"{sample.tokens}",
                "The data changed after its lengths were taken; rebuild the length index.",
            )
        examples[position] = example
    return examples


def make_micro_batch(
    plan: Plan, task: Task, examples: Mapping[int, Example], transport: Transport, device: torch.device
) -> MicroBatch:
    """Cut this rank's rows out of its samples.

    A member that holds no row at all (a pack shorter than its group) gets one padding row, because models
    do not survive empty tensors; attention leaves it out and it supervises nothing.
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
    return MicroBatch(
        task=task,
        inputs={
            "input_ids": _tensor(np.concatenate(ids), device)[None],
            "position_ids": _tensor(np.concatenate(positions), device)[None],
            "flexcp": TaskContext(layout, transport.exchange(task.ranks), padding_rows),
        },
        labels=_tensor(targets, device),
        supervised_tokens=int((targets != IGNORE_INDEX).sum()),
        sample_ids=tuple(plan.samples[position].id for position in task.samples),
    )


def _tensor(rows: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device, non_blocking=True)
