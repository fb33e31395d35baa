"""What must be equal on all ranks before step 0: compared by hash, the first difference named."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch.distributed as dist

from flexcp.core.errors import DisagreementError
from flexcp.runtime.collectives import first_difference

_SHOWN_CHARS = 80
_SAME_VERSION = "Start all ranks from one checkout of FlexCP, or install one version on all machines."


def require_agreement(values: Mapping[str, str], remedy: str) -> None:
    """Refuse to go on where ranks have different values; all ranks call it.

    Ranks of other versions may compare other things, so version and names are compared before the values.

    Raises:
        DisagreementError: a value is not the same on all ranks; on all ranks, each says its own value.
    """
    own = "version of flexcp"
    heads = {own: _own_version(), "list of settings to compare": json.dumps(list(values))}
    for part in (heads, dict(values)):
        if difference := first_difference(part):
            name, ranks = difference
            raise DisagreementError(
                f"ranks {ranks} have another {name} than rank 0 "
                f"(rank {dist.get_rank()}: {part[name][:_SHOWN_CHARS]})",
                _SAME_VERSION if name == own else remedy,
            )


def versions() -> dict[str, str]:
    """Of everything else whose version can change a plan or a loss; FlexCP's own is always compared."""
    packages = ("torch", "numpy", "transformers", "tokenizers")
    installed = {f"version of {package}": _installed(package) for package in packages}
    return {"version of Python": platform.python_version(), **installed}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def _own_version() -> str:
    """Number, and a hash of the sources: two checkouts may have one number."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return f"{_installed('flexcp')}, sources {digest.hexdigest()[:12]}"
