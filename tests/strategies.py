"""All Hypothesis strategies of the project: samples, clusters, cost models, tables, problems to plan."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from flexcp.core.cluster import Cluster
from flexcp.core.sample import Sample
from flexcp.cost.model import CostModel, Link


@st.composite
def samples(draw, max_tokens=400, min_size=1, max_size=30, spans=True):
    """A global batch: ids are unique but in no order; some have one full-attention span, or images."""
    lengths = draw(st.lists(_skewed(max_tokens), min_size=min_size, max_size=max_size))
    ids = draw(st.permutations(range(len(lengths))))
    batch = []
    for sample_id, tokens in zip(ids, lengths, strict=True):
        span = ()
        if spans and draw(st.booleans()):
            start = draw(st.integers(0, tokens - 1))
            span = ((start, draw(st.integers(start + 1, tokens))),)
        encoder_pairs = draw(st.sampled_from([0, 0, 7, 10_000])) if spans else 0
        batch.append(Sample(sample_id, tokens, span, encoder_pairs))
    return tuple(batch)


def _skewed(max_tokens):
    """Mostly short, sometimes as long as allowed, as real lengths are."""
    return st.one_of(st.integers(1, max(1, max_tokens // 10)), st.integers(1, max_tokens))


@st.composite
def clusters(draw, max_ranks=16, min_tokens=1, max_tokens=64):
    """Any number of ranks, primes too; nodes that need not divide it."""
    return Cluster(
        ranks=draw(st.integers(1, max_ranks)),
        tokens_per_rank=draw(st.integers(min_tokens, max_tokens)),
        ranks_per_node=draw(st.integers(1, 8)),
    )


@st.composite
def cost_models(draw):
    """Coefficients over several orders of magnitude: compute-bound, ring-bound and overhead-bound models."""

    def scale(low, high):
        return 10.0 ** draw(st.integers(low, high))

    intra = Link(scale(3, 7), draw(st.sampled_from([0.0, 1e-4, 1e-2])))
    heads, kv_heads = draw(st.sampled_from([(0, 0), (4, 2), (16, 16), (32, 4), (6, 3)]))
    inter = Link(intra.bytes_per_s / draw(st.sampled_from([1, 4, 10])), intra.latency_s * 2)
    return CostModel(
        pair_s=scale(-6, -3),
        token_s=scale(-4, -1),
        sample_s=draw(st.sampled_from([0.0, 1e-3])),
        pack_s=draw(st.sampled_from([0.0, 1e-2, 1.0])),
        ring_step_s=draw(st.sampled_from([0.0, 1e-2, 1.0])),
        kv_bytes_per_token=scale(0, 3),
        layers=draw(st.integers(1, 4)),
        intra=intra,
        inter=inter,
        passes=draw(st.sampled_from([2, 3])),
        heads=heads,
        kv_heads=kv_heads,
        head_bytes_per_token=scale(0, 2),
    )


@st.composite
def problems(draw, max_samples=30, max_ranks=16, max_tokens=64):
    """(samples, cluster, cost) that has a plan: no sample exceeds what all ranks hold together."""
    cluster = draw(clusters(max_ranks=max_ranks, max_tokens=max_tokens))
    batch = draw(samples(max_tokens=cluster.capacity_tokens, max_size=max_samples))
    return batch, cluster, draw(cost_models())


@st.composite
def time_tables(draw, max_packs=6, max_ranks=9):
    """Seconds by pack and degree, shape (K, N), monotone or not, infinite below a least degree."""
    num_packs = draw(st.integers(1, max_packs))
    ranks = draw(st.integers(num_packs, max_ranks))
    seconds = st.integers(1, 40).map(float)
    table = np.array(
        draw(
            st.lists(
                st.lists(seconds, min_size=ranks, max_size=ranks), min_size=num_packs, max_size=num_packs
            )
        )
    )
    if draw(st.booleans()):
        table = np.minimum.accumulate(table, axis=1)
    spare = ranks - num_packs
    for row in table:
        least = draw(st.integers(0, spare))
        spare -= least
        row[:least] = np.inf
    return table
