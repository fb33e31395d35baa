"""What must be equal on all ranks before step 0: compared by hash, the first difference named."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist

from flexcp.core.errors import DisagreementError
from flexcp.runtime.collectives import first_difference

_SHOWN_CHARS = 80


def require_agreement(values: Mapping[str, str], remedy: str) -> None:
    """All ranks call it, with the same names in the same order.

    Raises:
        DisagreementError: a value is not the same on all ranks; on all ranks, each says its own value.
    """
    if difference := first_difference(dict(values)):
        name, ranks = difference
        raise DisagreementError(
            f"ranks {ranks} have another {name} than rank 0 "
            f"(rank {dist.get_rank()}: {values[name][:_SHOWN_CHARS]})",
            remedy,
        )


def versions() -> dict[str, str]:
    """Of everything whose version can change a plan or a loss."""
    found = {"version of Python": platform.python_version()}
    for package in ("flexcp", "torch", "numpy", "transformers", "tokenizers"):
        try:
            found[f"version of {package}"] = version(package)
        except PackageNotFoundError:
            found[f"version of {package}"] = "not installed"
    return found
