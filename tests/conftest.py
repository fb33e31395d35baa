"""What holds for all tests: those marked `gpu` are skipped where there is no accelerator."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A plain `pytest` passes on a laptop; torch is looked for only where such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_accelerator():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


def _has_accelerator() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.accelerator.is_available()
