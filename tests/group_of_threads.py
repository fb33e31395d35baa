"""A model of transformers in a group of threads: every member its own copy, no process and no network.

For what needs many families and degrees; the same through real processes is in `tests/distributed`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp.core.cluster import Cluster
from flexcp.core.plan import ExchangeKind, Plan, Task
from flexcp.core.sample import Sample
from flexcp.integrations.transformers import enable
from flexcp.runtime.batches import MicroBatch, make_micro_batch
from flexcp.runtime.step import loss_sum_of
from tests.reference import ThreadExchange, gather, run_members


@dataclass(frozen=True)
class Stepped:
    """What a group made of one pack: as `tests.models.reference_step`, and the logits of the whole pack."""

    loss: float
    grads: dict[str, Tensor]
    logits: Tensor
    micros: list[MicroBatch]


class _Transport:
    """As much of `runtime.transport.Transport` as cutting a micro-batch takes."""

    def __init__(self, exchange: ThreadExchange) -> None:
        self.rank = exchange.member
        self._exchange = exchange

    def exchange(self, *_: Any) -> ThreadExchange:
        return self._exchange


def one_pack(
    model: Any,
    dataset: Any,
    indices: Sequence[int],
    degree: int,
    kind: ExchangeKind = "ring",
    whole_below: int = 0,
    *,
    autocast: bool = False,
) -> Stepped:
    """Run samples as one pack on `degree` members, forward and backward, by the rule of a step."""
    lengths = [len(dataset[index]["input_ids"]) for index in indices]
    samples = tuple(Sample(index, tokens) for index, tokens in zip(indices, lengths, strict=True))
    task = Task(tuple(range(len(samples))), tuple(range(degree)), 0, 0.0, 1.0, kind)
    plan = Plan("test", "lockstep", Cluster(degree, 10**6), whole_below, samples, (task,), 1.0)
    examples = {position: dataset[index] for position, index in enumerate(indices)}
    supervised = sum(_targets(example) for example in examples.values())
    models = [copy.deepcopy(model) for _ in range(degree)]

    def work(exchange: ThreadExchange) -> tuple[float, dict[str, Tensor], Tensor, MicroBatch]:
        mine = models[exchange.member]
        transport: Any = _Transport(exchange)
        micro = make_micro_batch(plan, task, examples, transport)
        with enable(mine), torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # of this thread alone
            output = mine(**micro.inputs)
            loss = loss_sum_of(output, micro) / supervised
            auxiliary = micro.inputs["flexcp"].auxiliary_sum
            (loss if auxiliary is None else loss + auxiliary / sum(lengths)).backward()
        rows = plan.layout(task).rows(exchange.member)
        return float(loss.detach()), gradients(mine), output.logits[0, :rows].detach(), micro

    losses, grads, logits, micros = zip(*run_members(degree, work, kind), strict=True)
    total = {name: sum((part[name] for part in grads[1:]), grads[0][name]) for name in grads[0]}
    return Stepped(sum(losses), total, gather(logits, plan.layout(task)), list(micros))


def gradients(model: Any) -> dict[str, Tensor]:
    """By name, zeros where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def _targets(example: Any) -> int:
    return int((torch.as_tensor(example["labels"])[1:] != -100).sum())
