"""Every row lies on exactly one member, and the members are level."""

from __future__ import annotations

import random

import pytest
import torch
from tests.reference import gather, rows_of, scatter

from flexcp.core.layout import make_layout
from flexcp.core.sample import samples_from_lengths

PRIMES = (2, 3, 7, 13, 97, 997)


@pytest.mark.parametrize("degree", range(1, 9))
@pytest.mark.parametrize("whole_below_tokens", [0, 6, 100_000])
def test_gather_undoes_scatter(degree: int, whole_below_tokens: int) -> None:
    """D22 D42: an integer tensor that holds its own index comes back, so nothing is lost or doubled."""
    rng = random.Random(degree)
    for _ in range(30):
        lengths = [rng.choice([1, 2, 5, rng.randint(1, 200)]) for _ in range(rng.randint(1, 12))]
        layout = make_layout(samples_from_lengths(lengths), degree, whole_below_tokens)
        index = torch.arange(sum(lengths))
        parts = scatter(index, layout)
        assert torch.equal(gather(parts, layout), index)
        assert torch.equal(torch.cat(parts).sort().values, index)
        assert [len(part) for part in parts] == [layout.rows(member) for member in range(degree)]


@pytest.mark.parametrize("degree", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("lengths", [[length] for length in PRIMES] + [[1], [3, 1], list(PRIMES)])
def test_cut_samples_are_level_to_one_row(degree: int, lengths: list[int]) -> None:
    """D13 D23 D24: prime lengths and lengths below the degree, without a row of padding."""
    layout = make_layout(samples_from_lengths(lengths), degree, 0)
    loads = [layout.rows(member) for member in range(degree)]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("degree", [2, 3, 5, 7])
def test_rows_are_level_beside_whole_samples(degree: int) -> None:
    """The fullest member holds no more than its share, or than the whole samples placed there."""
    rng = random.Random(degree)
    for _ in range(50):
        lengths = [rng.choice([rng.randint(1, 40), rng.randint(40, 900)]) for _ in range(rng.randint(1, 20))]
        layout = make_layout(samples_from_lengths(lengths), degree, 40)
        share = -(-sum(lengths) // degree)
        for member in range(degree):
            whole = sum(piece.rows for piece in layout.whole[member])
            assert layout.rows(member) <= max(share, whole)


def test_rows_of_one_sample_ascend_on_every_member() -> None:
    """The masks rest on it: local order is order of position, and a sample's rows are neighbours."""
    layout = make_layout(samples_from_lengths([50, 3, 200, 1, 77]), 5, 10)
    for member in range(5):
        for pieces in (layout.cut[member], layout.whole[member]):
            keys = [(piece.index, piece.start) for piece in pieces]
            assert keys == sorted(keys)
            assert all(piece.rows > 0 for piece in pieces)


def test_causal_work_is_level() -> None:
    """Zigzag: one odd row of 4001 is all that sets the busiest member apart, at any degree."""
    for degree in (2, 3, 5, 7, 8):
        layout = make_layout(samples_from_lengths([4001]), degree, 0)
        work = [int((rows_of(layout, member) + 1).sum()) for member in range(degree)]
        assert max(work) * degree / sum(work) < 1.005
