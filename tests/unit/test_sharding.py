"""Ways to hold parameters, as far as one process shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flexcp.core.errors import UnknownNameError
from flexcp.runtime import sharding
from flexcp.runtime.sharding import Replicated, shard, weights_checksum


@pytest.mark.parametrize(
    ("numbers", "dtypes", "sizes"),
    [
        ([3, 5, 2], "fff", [[3, 5], [2]]),  # 32 bytes, then 8
        ([8, 1, 7], "fff", [[8], [1, 7]]),  # a full one
        ([9, 20, 1], "fff", [[9], [20], [1]]),  # larger than any bucket
        ([1, 2, 3, 4], "fhhf", [[1], [2, 3], [4]]),  # other dtypes
        ([], "", []),
    ],
)
def test_every_gradient_is_in_one_bucket(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], dtypes: str, sizes: list[list[int]]
) -> None:
    """In order, of one dtype and 32 bytes at most, or alone."""
    monkeypatch.setattr(sharding, "_BUCKET_BYTES", 32)
    kinds = {"f": torch.float32, "h": torch.bfloat16}
    grads = [torch.zeros(number, dtype=kinds[kind]) for number, kind in zip(numbers, dtypes, strict=True)]
    buckets = list(sharding._buckets(grads))

    assert [[grad.numel() for grad in bucket] for bucket in buckets] == sizes
    assert [grad.data_ptr() for bucket in buckets for grad in bucket] == [g.data_ptr() for g in grads]


def test_the_sums_of_all_buckets_come_back_to_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks that have the same gradients; a parameter without one takes part with zeros."""
    monkeypatch.setattr(sharding, "_BUCKET_BYTES", 64)
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sharding.dist, "all_reduce", lambda flat: flat.mul_(2))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 1))
    expected = []
    for number, parameter in enumerate(list(model.parameters())[:-1]):
        parameter.grad = torch.arange(parameter.numel()).view_as(parameter) + float(number)
        expected.append(2 * parameter.grad)
    Replicated(model).reduce()

    grads = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(grad, two) for grad, two in zip(grads, [*expected, torch.zeros(1)], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_of_one_weight_is_another_checksum(dtype: torch.dtype) -> None:
    """Also where the weight is in the last of many; equal weights have equal ones."""
    models = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5)).to(dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    same = weights_checksum(models[1])
    with torch.no_grad():
        bias = models[1][1].bias
        bias[-1] = torch.nextafter(bias[-1], torch.tensor(9.0, dtype=dtype))

    assert same == weights_checksum(models[0]) != weights_checksum(models[1])


@pytest.mark.parametrize("kind", ["FSDP2", "DDP", "zero3"])
def test_a_way_that_is_not_offered_is_refused(kind: Any) -> None:
    """It must not pass for the one that happens to come last."""
    with pytest.raises(UnknownNameError, match=r"unknown sharding .*\n.*Known: ddp, fsdp2\."):
        shard(nn.Linear(2, 2), kind)
