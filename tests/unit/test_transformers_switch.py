"""What `enable` leaves behind: a model that is freed, and one that is as it was when it was refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from tests.models import tiny_model

from flexcp.core.errors import UnsupportedError
from flexcp.integrations.transformers import enable, is_enabled


def test_an_enabled_model_is_freed() -> None:
    """Its switch lives as long as the model, and no longer."""
    model = tiny_model()
    enable(model)
    gc.collect()
    assert is_enabled(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_refused_model_is_switched_back() -> None:
    """Also one that took the name in a part of its config before it was found out."""
    model: Any = tiny_model()
    asked: list[Any] = []
    model.set_attn_implementation = asked.append
    with pytest.raises(UnsupportedError, match="does not take its attention from the registry"):
        enable(model)
    assert asked == ["flexcp", "sdpa"]
    assert not is_enabled(model)
