"""The table of contents of a checkpoint may name its own few classes, and nothing that could run."""

from __future__ import annotations

import io
import pickle
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from flexcp.core.errors import CheckpointError
from flexcp.runtime.safe_reader import _TableUnpickler

RUNNABLE = [
    "builtins.eval",
    "builtins.exec",
    "builtins.getattr",
    "builtins.__import__",
    "collections.namedtuple",
    "functools.partial",
    "importlib.import_module",
    "operator.attrgetter",
    "os.system",
    "pathlib.Path",
    "posix.system",
    "subprocess.Popen",
    "torch.load",
    "torch.Tensor",
    "torch.hub.load",
    "torch.serialization.load",
    "torch.distributed.checkpoint.filesystem.FileSystemWriter",
]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_name_that_no_checkpoint_needs_is_refused(name: str) -> None:
    """Before it is imported, and by name."""
    module, _, attribute = name.rpartition(".")
    table = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n."  # opcode GLOBAL

    with pytest.raises(CheckpointError) as caught:
        _TableUnpickler(io.BytesIO(table)).load()
    assert f"asks for {name}, which no checkpoint needs" in caught.value.cause


def test_an_object_kept_elsewhere_is_refused() -> None:
    """What a table points to by number alone is nothing that this reader could vouch for."""
    with pytest.raises(CheckpointError, match="asks for an object kept elsewhere"):
        _TableUnpickler(io.BytesIO(b"Pkey\n.")).load()  # opcode PERSID


def test_what_checkpoints_are_made_of_is_read() -> None:
    table = [Metadata({}), MetadataIndex("a"), torch.bfloat16, torch.Size([2]), PosixPath("a")]

    assert _TableUnpickler(io.BytesIO(pickle.dumps(table))).load() == table
