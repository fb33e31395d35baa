"""Reads checkpoints of torch.distributed.checkpoint without trusting them.

torch reads the table of contents (`.metadata`) and every value that is no tensor with a full unpickler, which
runs whatever a file says. Here the table is read by an unpickler that knows a short list of names, and values
as weights only; tensors torch reads as weights only by itself.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from flexcp.core.errors import CheckpointError

_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


class SafeReader(FileSystemReader):
    """Files of one checkpoint folder.

    Raises:
        CheckpointError: the table of contents names anything but the classes it is made of, or a file
            outside of its folder; a tensor or value was changed on the disk.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table of contents."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with path.open("rb") as stream:
            metadata = _TableUnpickler(stream).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise _refused(f"a {type(metadata).__name__}")
        for part in metadata.storage_data.values():
            if part.relative_path != PurePath(part.relative_path).name:
                raise _refused(f"the file {part.relative_path!r}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def parts(self) -> list[tuple[MetadataIndex, Any]]:
        """Every tensor or value, with its file and its place there."""
        return list(self.read_metadata().storage_data.items())

    def read_value(self, part: Any) -> Any:
        """One value, as one of `parts`; not for tensors that are large."""
        data = self._read(part)
        _require_sound(data, part.relative_path)
        return torch.load(io.BytesIO(data), weights_only=True)

    def _read(self, part: Any) -> bytes:
        with (Path(self.path) / part.relative_path).open("rb") as file:
            file.seek(part.offset)
            data: bytes = file.read(part.length)
        return data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """What this rank needs; torch writes checksums and reads without a look at them."""
        for item in plan.items:
            part = self.storage_data[item.storage_index]
            _require_sound(self._read(part), part.relative_path)
        return super().read_data(plan, planner)


class SafeLoadPlanner(DefaultLoadPlanner):
    """Numbers and texts of a checkpoint are read as torch reads weights: nothing in them can run."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one value in its place in the nested state."""
        *path, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for key in path:
            place = place[key]
        place[last] = torch.load(value, weights_only=True)


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _KNOWN.get(module, ())
        if known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _refused("an object kept elsewhere")


def _require_sound(data: bytes, name: str) -> None:
    """Whether a tensor or value is as it was written: torch keeps each as a zip file with checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            damaged = parts.testzip()
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, zlib.error) as error:
        damaged = str(error)
    if damaged is not None:
        raise CheckpointError(
            f"{name} is damaged: its bytes are not those that were written ({damaged})",
            "Remove this checkpoint to resume from an older one.",
        )


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"the table of contents (.metadata) of the checkpoint asks for {what}, which no checkpoint needs",
        "Do not load it: somebody has changed it, or another program wrote it.",
    )
