"""A trained model as transformers loads it: what happens where there is no room for it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from tests.models import tiny_model

from flexcp.core.errors import SaveError
from flexcp.runtime.launch import joined_world
from flexcp.train.export import save_pretrained


def test_a_model_that_does_not_fit_on_the_disk_is_said(tmp_path: Path) -> None:
    """The writer of weights has an error of its own, which is no OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with joined_world(rendezvous=tmp_path / "meet"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(SaveError, match=r"could not be written to .*: .*large") as caught:
                save_pretrained(tiny_model(), tmp_path / "model", None)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "--resume" in caught.value.remedy
