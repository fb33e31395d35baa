"""A sample as bytes and back, for its way from the rank that decoded it to the ranks that run it.

A JSON header says what follows it; nothing that arrives is unpickled. Values come out as they went in: arrays
as arrays, tensors as tensors, to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexcp.core.errors import DataError

Bytes = NDArray[np.uint8]

_SIZE = np.dtype("<i8")  # of the header's length


def packet_of(example: Mapping[str, Any]) -> Tensor:
    """uint8 [bytes].

    Raises:
        DataError: a value that can be sent by no other way than pickling.
    """
    header, parts = [], []
    for key, value in example.items():
        entry, part = _encode(key, value)
        header.append([key, *entry, len(part)])
        parts.append(part)
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    size = np.array([len(text)], dtype=_SIZE).view(np.uint8)
    return torch.from_numpy(np.concatenate([size, text, *parts]))


def example_of(packet: Tensor) -> dict[str, Any]:
    """What `packet_of` was given; it shares no memory with the packet."""
    data: Bytes = packet.numpy()
    start = _SIZE.itemsize + int(data[: _SIZE.itemsize].copy().view(_SIZE)[0])
    example = {}
    for key, kind, dtype, shape, size in json.loads(data[_SIZE.itemsize : start].tobytes()):
        example[key] = _decode(kind, dtype, shape, data[start : start + size].copy())
        start += size
    return example


def _encode(key: str, value: Any) -> tuple[tuple[str, str, list[int]], Bytes]:
    """Kind, dtype and shape, and the bytes."""
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout is torch.strided:
        flat = value.detach().contiguous().reshape(-1)
        name = str(value.dtype).removeprefix("torch.")
        return ("tensor", name, list(value.shape)), flat.view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        return ("array", value.dtype.str, list(value.shape)), _flat(value)
    if isinstance(value, bytes):
        return ("bytes", "", []), np.frombuffer(value, dtype=np.uint8)
    try:
        text = json.dumps(value)
        if json.loads(text) == value:
            return ("json", "", []), np.frombuffer(text.encode(), dtype=np.uint8)
    except (TypeError, ValueError):
        pass
    raise DataError(
        f"its {key!r} is a {type(value).__name__}, which cannot travel to another rank",
        "Give arrays of numbers, dense CPU tensors, bytes, text, numbers, or lists and dicts of these.",
    )


def _flat(array: NDArray[Any]) -> Bytes:
    flat: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat


def _decode(kind: str, dtype: str, shape: list[int], data: Bytes) -> Any:
    match kind:
        case "tensor":
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(data))
            return tensor
        case "array":
            return data.view(dtype).reshape(shape)
        case "bytes":
            return data.tobytes()
        case _:
            return json.loads(data.tobytes())
