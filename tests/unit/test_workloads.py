"""Length distributions: what is known of each data set holds for what is drawn."""

import math
from dataclasses import replace

import numpy as np
import pytest

from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.reproduce.workloads import CONTEXT_TOKENS, WORKLOADS, Workload, workload

SHARES = (np.arange(400_000) + 0.5) / 400_000


def test_wikipedia_has_the_known_tail():
    """Not the percentiles, which are put in, but what else was counted: shares of samples and of tokens."""
    tokens = replace(workload("wikipedia"), context_tokens=10**7).tokens(SHARES)
    total = tokens.sum()
    counted = {8192: (0.0160, 0.275), 32_768: (0.00130, 0.076), 65_536: (0.00028, 0.031)}

    assert tokens.mean() == pytest.approx(1014, rel=0.03)
    for limit, (samples, share) in counted.items():
        assert (tokens > limit).mean() == pytest.approx(samples, rel=0.05)
        assert tokens[tokens > limit].sum() / total == pytest.approx(share, rel=0.05)


def test_msrvtt_has_the_published_mean():
    seconds = workload("msrvtt").scaled(1000.0)

    assert seconds.mean_tokens() / 1000 == pytest.approx(41.2 * 3600 / 10_000, rel=0.002)
    assert seconds.longest_tokens == 30_000
    assert seconds.tokens(SHARES).min() >= 10_000


def test_openvid_agrees_with_the_first_version():
    """Most below 8 s, few above 64 s."""
    seconds = workload("openvid").scaled(100.0).tokens(SHARES) / 100

    assert 0.6 < (seconds < 8).mean() < 0.75
    assert 0.01 < (seconds > 64).mean() < 0.03


def test_tail_is_pareto_of_its_index():
    tail = replace(workload("commoncrawl"), context_tokens=10**9)
    tokens = tail.tokens(np.array([0.99, 0.999, 0.9999]))

    assert tokens[1:] / tokens[:-1] == pytest.approx([10 ** (1 / 1.35)] * 2, rel=1e-3)


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_rise_and_stay_in_the_context(name):
    tokens = workload(name).scaled(500.0).tokens(SHARES)

    assert (np.diff(tokens) >= 0).all()
    assert 1 <= tokens.min() <= tokens.max() <= CONTEXT_TOKENS
    assert tokens.max() <= workload(name).scaled(500.0).longest_tokens
    assert workload(name).within(4096).tokens(SHARES).max() <= 4096


def test_same_seed_same_shares():
    """A scale stretches the same batch, so that a fit sees no noise; another seed is another batch."""
    small = Workload("s", ((0.0, 100), (0.5, 200)), "tokens", "made up", context_tokens=10**9)
    first, again = small.batches(16, 2, seed=3), small.batches(16, 2, seed=3)
    doubled = small.scaled(2.0).batches(16, 2, seed=3)

    assert first == again != small.batches(16, 2, seed=4)
    assert [len(batch) for batch in first] == [16, 16]
    for batch, other in zip(first, doubled, strict=True):
        assert all(abs(2 * a.tokens - b.tokens) <= 1 for a, b in zip(batch, other, strict=True))


def test_origin_is_told():
    assert all(len(w.origin) > 60 for w in WORKLOADS.values())


@pytest.mark.parametrize(
    "knots",
    [
        ((0.0, 5.0),),
        ((0.1, 5.0), (0.5, 6.0)),
        ((0.0, 5.0), (1.0, 6.0)),
        ((0.0, 5.0), (0.5, 5.0)),
        ((0.0, 0.0), (0.5, 5.0)),
    ],
)
def test_bad_knots_are_refused(knots):
    with pytest.raises(ConfigError, match="knots of made-up"):
        Workload("made-up", knots, "tokens", "")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_bad_scale_is_refused(scale):
    with pytest.raises(ConfigError, match="scale of github"):
        workload("github").scaled(scale)


def test_unknown_data_set():
    with pytest.raises(UnknownNameError, match="Did you mean 'github'"):
        workload("gitub")
