"""Samples as bytes: what comes out is what went in, and what cannot travel is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexcp.core.errors import DataError
from flexcp.runtime.packets import example_of, packet_of

VALUES: list[Any] = [
    np.arange(5),
    np.arange(24, dtype=">i2").reshape(2, 3, 4)[:, ::2].T,
    np.array(3.5, dtype=np.float16),
    np.zeros((0, 7)),
    np.array([True, False]),
    np.array(["a", "éé"]),
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
    torch.tensor(7),
    torch.zeros(3, 0),
    torch.tensor([True, False, True]),
    torch.randn(3, dtype=torch.complex64),
    b"\x00\xff\n",
    b"",
    [1, 2, 3],
    {"caption": "ein Bild", "boxes": [[0, 1.5], []], "seen": None, "kept": True},
    "text",
    0.1,
]


def same(one: Any, other: Any) -> bool:
    """Kind, dtype, shape and every bit."""
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and (one == other).all())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_a_value_comes_out_as_it_went_in(number: int) -> None:
    value = VALUES[number]
    out = example_of(packet_of({"before": [1], "value": value, "after": np.ones(2)}))

    assert list(out) == ["before", "value", "after"]
    assert type(out["value"]) is type(value)
    assert same(value, out["value"])
    assert (out["after"] == 1).all()


@given(st.lists(st.sampled_from(VALUES), max_size=6))
def test_any_mixture_of_values(values: list[Any]) -> None:
    example = {str(index): value for index, value in enumerate(values)}
    out = example_of(packet_of(example))

    assert out.keys() == example.keys()
    assert all(same(example[key], out[key]) for key in example)


def test_what_comes_out_may_be_written_to() -> None:
    """It shares no memory with the buffer that it came in, which can go."""
    packet = packet_of({"a": np.arange(3), "b": torch.arange(3)})
    out = example_of(packet)
    out["a"][0], out["b"][0] = 9, 9
    again = example_of(packet)

    assert again["a"][0] == again["b"][0] == 0


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "object"),
        (np.array([object()]), "ndarray"),
        ((1, 2), "tuple"),
        ({1: 2}, "dict"),
        (torch.zeros(2, device="meta"), "Tensor"),
        ({"deep": np.zeros(2)}, "dict"),
    ],
)
def test_what_would_need_pickling_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(DataError, match=f"its 'thing' is a {kind}, which cannot travel") as caught:
        packet_of({"thing": value})

    assert "arrays of numbers" in caught.value.remedy
