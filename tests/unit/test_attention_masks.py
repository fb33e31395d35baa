"""Tiles against the dense mask: the first thing to hold, or every dtype shows errors of 0.1."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tests.reference import dense_mask, rows_of

from flexcp.attention.masks import Tile, make_tiles
from flexcp.core.errors import InputError
from flexcp.core.layout import Layout, make_layout, windowed
from flexcp.core.sample import Sample


def random_sample(rng: random.Random, index: int, longest: int) -> Sample:
    """Any length, and in half of the cases spans: none, some, adjacent, one row, or everything."""
    tokens = rng.choice([1, 2, 3, rng.randint(1, 8), rng.randint(1, longest)])
    if rng.random() < 0.15:
        return Sample(index, tokens, ((0, tokens),))
    borders = sorted(rng.sample(range(tokens + 1), min(tokens + 1, rng.choice([0, 0, 2, 3, 6]))))
    pairs = itertools.pairwise(borders)
    return Sample(index, tokens, tuple(pair for pair in pairs if rng.random() < 0.6))


def random_layout(rng: random.Random, longest: int = 60) -> Layout:
    pack = tuple(random_sample(rng, i, longest) for i in range(rng.choice([1, 1, 2, 3, 9])))
    return make_layout(pack, rng.randint(1, 8), rng.choice([0, 5, 20, 10_000]))


def coverage(layout: Layout) -> torch.Tensor:
    """How often every query-key pair of the whole pack is computed, over all pairs of members."""
    rows = [rows_of(layout, member) for member in range(layout.degree)]
    total = sum(len(part) for part in rows)
    count = torch.zeros(total, total, dtype=torch.int32)
    for queries in range(layout.degree):
        for keys in range(layout.degree):
            for q0, q1, k0, k1, causal, turned in make_tiles(layout, queries, keys):
                tile = torch.ones(q1 - q0, k1 - k0, dtype=torch.int32)
                if causal:
                    assert q1 - q0 == k1 - k0
                    tile = tile.triu() if turned else tile.tril()
                assert tile.numel()
                assert q1 <= len(rows[queries])
                assert k1 <= (len(rows[keys]) if queries == keys else layout.cut_rows(keys))
                count[rows[queries][q0:q1, None], rows[keys][k0:k1]] += tile
    return count


@pytest.mark.parametrize("seed", range(10))
def test_every_attended_pair_is_computed_exactly_once(seed: int) -> None:
    """D20 D21 D24 D25 D44: random packs, spans, degrees 1..8, lengths from 1, whole samples or none."""
    rng = random.Random(seed)
    for _ in range(40):
        layout = random_layout(rng)
        assert torch.equal(coverage(layout), dense_mask(layout.samples).int()), layout


@pytest.mark.parametrize("seed", range(10))
def test_every_pair_within_a_window_is_computed_exactly_once(seed: int) -> None:
    """D46: windows of one row up to longer than any sample, over the same packs and spans."""
    rng = random.Random(1000 + seed)
    for _ in range(40):
        layout = random_layout(rng)
        window = rng.choice([1, 2, 3, rng.randint(1, 20), rng.randint(1, 70)])
        expected = dense_mask(layout.samples, window).int()
        assert torch.equal(coverage(windowed(layout, window)), expected), (layout, window)


def test_a_window_is_at_least_one_row_and_hides_what_it_should() -> None:
    layout = make_layout((Sample(0, 64),), 2, 0)
    assert windowed(layout, 8) is windowed(layout, 8)  # it is a key of caches
    assert sum(map(int, coverage(windowed(layout, 8)).flatten())) == 36 + 56 * 8
    assert make_tiles(windowed(layout, 64), 0, 1) == make_tiles(layout, 0, 1)
    with pytest.raises(
        InputError, match=r"the attention window is 0\nA row sees at least itself: 1 or more\."
    ):
        windowed(layout, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_every_attended_pair_is_computed_exactly_once_long(seed: int) -> None:
    """As above, with more and longer samples."""
    rng = random.Random(seed)
    for _ in range(60):
        layout = random_layout(rng, longest=400)
        assert torch.equal(coverage(layout), dense_mask(layout.samples).int()), layout


def test_one_causal_sample_needs_one_tile_per_block() -> None:
    """One square at home and at most one rectangle for every other member, whatever the degree."""
    for degree in (1, 2, 3, 5, 8):
        layout = make_layout((Sample(0, 1000),), degree, 0)
        for member in range(degree):
            rows = layout.rows(member)
            assert make_tiles(layout, member, member) == (Tile(0, rows, 0, rows, True),)
            for other in set(range(degree)) - {member}:
                (tile,) = make_tiles(layout, member, other)
                assert not tile.causal


def test_a_full_sample_needs_one_rectangle_per_block() -> None:
    """D25: without causality nothing is left to skip, and nothing is left to cut."""
    layout = make_layout((Sample(0, 90, ((0, 90),)),), 3, 0)
    tiles = {make_tiles(layout, q, k) for q in range(3) for k in range(3)}
    assert tiles == {(Tile(0, 30, 0, 30, False),)}


def test_spans_cost_few_tiles() -> None:
    """Three images in a text: rectangles and squares, no mask tensor and no tile per row."""
    spans = ((100, 676), (1000, 1576), (3000, 3576))
    layout = make_layout((Sample(0, 4096, spans),), 1, 0)
    assert len(make_tiles(layout, 0, 0)) == 7


def test_tiles_do_work_in_proportion_to_the_mask() -> None:
    """Merging never adds an entry: the area computed is the number of attended pairs."""
    rng = random.Random(7)
    layout = random_layout(rng)
    assert int(coverage(layout).sum()) == sum(sample.attended_pairs for sample in layout.samples)
