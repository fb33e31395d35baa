"""Megatron's `.idx` files: only the lengths of their sequences are read, the tokens stay where they are."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import LengthsError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")


def is_megatron_index(path: Path, data: bytes) -> bool:
    """By its first bytes, or by its name."""
    return data[:9] == _MAGIC or path.suffix == ".idx"


def read_megatron_index(path: Path, data: bytes) -> npt.NDArray[np.int64]:
    """Lengths of an index: header, int32 lengths, int64 pointers, int64 documents (, int8 modes).

    Args:
        path: what to call it in messages.
        data: the whole file.

    Raises:
        LengthsError: not an index, another version, or cut short.
    """
    remedy = "Copy it again, or rebuild it with Megatron's preprocess_data."
    if data[:9] != _MAGIC:
        raise LengthsError(f"{path} is not a Megatron .idx: it does not begin with MMIDIDX", remedy)
    if len(data) < _HEADER.size:
        raise LengthsError(f"{path} is truncated: {len(data)} bytes, the header alone has 34", remedy)
    _, version, code, sequences, documents = _HEADER.unpack_from(data)
    if version != 1:
        raise LengthsError(f"{path} is .idx version {version}; version 1 is read", remedy)
    if not 1 <= code <= 8:
        raise LengthsError(f"{path} has the unknown data type code {code}; 1..8 are known", remedy)
    size = _HEADER.size + 12 * sequences + 8 * documents
    if len(data) not in (size, size + sequences):  # multimodal files add one mode byte a sequence
        state = "is truncated" if len(data) < size else "has bytes left over"
        raise LengthsError(
            f"{path} {state}: {sequences} sequences and {documents} document indices make {size} bytes, "
            f"the file has {len(data)}",
            remedy,
        )
    if not sequences:
        raise LengthsError(f"{path} holds no sequences", "Give at least one length.")
    return np.frombuffer(data, "<i4", sequences, _HEADER.size).astype(np.int64)
