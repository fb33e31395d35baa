"""Records of a stream as numbers: equal where they say the same, on every rank and in every process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexcp.runtime.sources import record_print


@dataclass
class Row:
    """A record of a user's own."""

    path: Path
    offset: int


class Opaque:
    """Prints its address."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a", "b"),
        (1, 2),
        (1, "1"),
        (b"a", b"b"),
        ("\udc80", "\udc81"),
        (Path("a"), Path("b")),
        (["ab", "c"], ["a", "bc"]),
        (["a", ["b"]], [["a"], "b"]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (np.arange(2000), np.arange(2000)[::-1]),
        (torch.tensor(1.0), torch.tensor(2.0)),
        (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (Row(Path("a"), 0), Row(Path("a"), 1)),
        ([1, 2], [2, 1]),
        (None, 0),
    ],
)
def test_other_records_have_other_numbers(one: Any, other: Any) -> None:
    """Also behind the thousandth element, which a printed array leaves out."""
    assert record_print(one) != record_print(other)


def test_records_without_a_value_are_of_their_kind() -> None:
    """Their addresses differ on all ranks and mean nothing."""
    assert record_print(Opaque()) == record_print(Opaque()) != record_print(object())
    assert record_print([Opaque(), 1]) != record_print([Opaque(), 2])
