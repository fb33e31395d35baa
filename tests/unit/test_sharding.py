"""Ways to hold parameters, as far as one process shows them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from flexcp.core.errors import UnknownNameError
from flexcp.runtime.sharding import shard


@pytest.mark.parametrize("kind", ["FSDP2", "DDP", "zero3"])
def test_a_way_that_is_not_offered_is_refused(kind: Any) -> None:
    """It must not pass for the one that happens to come last."""
    with pytest.raises(UnknownNameError, match=r"unknown sharding .*\n.*Known: ddp, fsdp2\."):
        shard(nn.Linear(2, 2), kind)
