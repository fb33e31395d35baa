"""From a micro-batch of the plan to what a Megatron forward step reads from its data iterator."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from flexcp.attention.upload import upload
from flexcp.core.layout import make_layout
from flexcp.core.plan import Plan
from flexcp.core.sample import IGNORE_INDEX
from flexcp.runtime.batches import MicroBatch, TaskContext
from flexcp.runtime.transport import Transport

Batch = dict[str, Any]


@dataclass(kw_only=True)
class SeqParams(PackedSeqParams):  # type: ignore[misc]  # Megatron is untyped
    """The task that a forward pass belongs to.

    A value of the call, so recomputation and late backward passes of a pipeline see their own task.

    Attributes:
        context: layout and exchange of the group.
        positions: [T], of the local rows in their uncut samples.
        table_rows: a power of two above every position, known to the host.
        sample_of_row: [T], which sample of the pack each row is of; their number where it is padding.
        sample_tokens: fp32 [samples + 1], of each sample; last that of padding, which is infinite.
        passes: when passes of the model began and ended in this process, on its `time.perf_counter`.
    """

    context: TaskContext
    positions: Tensor
    table_rows: int
    sample_of_row: Tensor
    sample_tokens: Tensor
    passes: list[tuple[float, float]] = field(default_factory=list)


def make_batch(micro: MicroBatch, multiple: int, device: torch.device) -> Batch:
    """What `next(data_iterator)` gives: the keys of Megatron's own batches, rows of this rank only.

    Args:
        micro: this rank's share of a task.
        multiple: rows are filled up to a multiple of it (of the TP size under sequence parallelism).
        device: where the model is.

    Returns:
        `tokens`, `labels`, `loss_mask`, `position_ids`, each [1, T]; `attention_mask`, None; and
        `packed_seq_params`. Labels are shifted; where there is no target they are 0 and the mask is 0.
    """
    context: TaskContext = micro.inputs["flexcp"]
    rows = len(micro.labels) - context.padding_rows
    fill = max(1, -(-rows // multiple)) * multiple - len(micro.labels)
    tokens, positions, targets = (
        F.pad(tensor.to(device, non_blocking=True), (0, fill), value=value)
        for tensor, value in (
            (micro.inputs["input_ids"], 0),
            (micro.inputs["position_ids"], 0),
            (micro.labels[None], IGNORE_INDEX),
        )
    )
    supervised = targets != IGNORE_INDEX
    return {
        "tokens": tokens,
        "labels": targets.where(supervised, 0),
        "loss_mask": supervised.float(),
        "attention_mask": None,
        "position_ids": positions,
        "packed_seq_params": _seq_params(
            TaskContext(context.layout, context.exchange, context.padding_rows + fill), positions[0]
        ),
    }


def idle_batch(transport: Transport, multiple: int, device: torch.device) -> Batch:
    """A batch without a sample, for a rank that must pass a wave without a task."""
    rows = torch.zeros(1, multiple, dtype=torch.int64, device=device)
    context = TaskContext(make_layout((), 1, 0), transport.exchange((transport.rank,)), multiple)
    return {
        "tokens": rows,
        "labels": rows,
        "loss_mask": rows.float(),
        "attention_mask": None,
        "position_ids": rows,
        "packed_seq_params": _seq_params(context, rows[0]),
    }


def _seq_params(context: TaskContext, positions: Tensor) -> SeqParams:
    pieces, samples = context.layout.pieces(context.exchange.member), context.layout.samples
    indices = [*(piece.index for piece in pieces), len(samples)]
    rows = [*(piece.rows for piece in pieces), context.padding_rows]
    sample_of_row = torch.repeat_interleave(torch.tensor(indices), torch.tensor(rows))
    sample_tokens = torch.tensor([*(float(sample.tokens) for sample in samples), math.inf])
    last = max((piece.stop - 1 for piece in pieces), default=0)
    # `sbhd`: Megatron hands q, k and v over as [T, 1, heads, width] and rotates row i by row i of the table.
    return SeqParams(
        qkv_format="sbhd",
        max_seqlen_q=len(positions),
        max_seqlen_kv=len(positions),
        context=context,
        positions=positions,
        # Megatron keeps the tables of the last 32 lengths: powers of two bound what they hold together.
        table_rows=1 << last.bit_length(),
        sample_of_row=upload(sample_of_row, positions.device),
        sample_tokens=upload(sample_tokens, positions.device),
    )


def by_wave(micro_batches: Sequence[MicroBatch], plan: Plan) -> list[MicroBatch | None]:
    """One entry for each wave of a plan, None where this rank has no task.

    Pipelines need it: all their stages run one order of forward and backward passes, which depends on the
    number of micro-batches alone. Where all ranks have as many, and the m-th of each is of wave m, the
    members of a group meet at the same point of that order, on every stage. Expert parallelism needs it too:
    the members of its groups exchange tokens in every layer of every pass.
    """
    own = {micro.task.wave: micro for micro in micro_batches}
    return [own.get(wave[0].wave) for wave in plan.waves]


class Batches(Iterator[Batch]):
    """The batches of one step, made as they are asked for: the device holds no data of later ones.

    Attributes:
        left: batches not asked for yet.
        handed: micro-batches handed out, None where a batch holds no sample, with their parameters.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch | None],
        transport: Transport,
        multiple: int,
        device: torch.device,
    ) -> None:
        self._waiting = iter(micro_batches)
        self.left = len(micro_batches)
        self.handed: list[tuple[MicroBatch | None, SeqParams]] = []
        self._transport, self._multiple, self._device = transport, multiple, device

    def __next__(self) -> Batch:
        """The next one."""
        micro = next(self._waiting)
        self.left -= 1
        if micro is None:
            batch = idle_batch(self._transport, self._multiple, self._device)
        else:
            batch = make_batch(micro, self._multiple, self._device)
        self.handed.append((micro, batch["packed_seq_params"]))
        return batch
