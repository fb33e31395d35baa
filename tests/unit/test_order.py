"""Sample order and random numbers: functions of seed, step and rank only (D26, D59)."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcp.core.errors import ConfigError
from flexcp.runtime.engine import step_seed
from flexcp.runtime.order import batch_indices, epoch_order, require_same_order
from flexcp.runtime.settings import data_name

counts = st.integers(1, 60)


@given(samples=counts, batch=st.integers(1, 150), seed=st.integers(0, 2**32), steps=st.integers(1, 8))
def test_steps_are_slices_of_the_epochs_laid_end_to_end(samples, batch, seed, steps):
    got = np.concatenate([batch_indices(samples, batch, seed, step) for step in range(steps)])
    epochs = -(-steps * batch // samples)
    wanted = np.concatenate([epoch_order(samples, seed, epoch) for epoch in range(epochs)])
    assert got.tolist() == wanted[: steps * batch].tolist()
    assert got.dtype == np.int64


@given(samples=counts, batch=counts, seed=st.integers(0, 2**32))
def test_each_epoch_visits_every_sample_exactly_once(samples, batch, seed):
    steps = samples  # samples * batch indices: exactly `batch` epochs
    got = np.concatenate([batch_indices(samples, batch, seed, step) for step in range(steps)])
    assert Counter(got.tolist()) == dict.fromkeys(range(samples), batch)


@pytest.mark.parametrize("samples", [1, 2, 249, 251, 511, 512, 513])
def test_awkward_counts_fill_every_batch(samples):
    """D26: sample counts 1, prime, one less than the batch."""
    for step in range(3):
        assert len(batch_indices(samples, 512, 7, step)) == 512


def test_resume_needs_only_the_step():
    """D59: stop after k steps, continue: the same ids as without the stop."""
    whole = [batch_indices(37, 8, 3, step).tolist() for step in range(20)]
    epoch_order.cache_clear()
    assert [batch_indices(37, 8, 3, step).tolist() for step in range(11, 20)] == whole[11:]


def test_the_order_is_the_same_in_another_process_and_forever():
    """The literal pins the stream: a change would reorder the data of every run that resumes."""
    code = "from flexcp.runtime.order import epoch_order; print(epoch_order(8, 42, 3).tolist())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(epoch_order(8, 42, 3).tolist()) == "[0, 6, 5, 1, 3, 7, 4, 2]"


def test_seed_and_epoch_change_the_order():
    base = epoch_order(100, 0, 0).tolist()
    assert base != epoch_order(100, 1, 0).tolist()
    assert base != epoch_order(100, 0, 1).tolist()
    assert epoch_order(100, 1, 0).tolist() != epoch_order(100, 0, 1).tolist()


def test_every_step_of_every_rank_draws_its_own_random_numbers():
    """Of every seed others; the literal pins those of runs that resume."""
    seeds = [step_seed(seed, step, rank) for seed in range(3) for step in range(4) for rank in range(5)]
    assert len(set(seeds)) == 3 * 4 * 5
    assert step_seed(42, 3, 1) == 5_430_396_998_017_525_854


def test_the_cached_order_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(4, 0, 0)[0] = 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1, 0, 0), "num_samples is 0\nnum_samples is at least 1."),
        ((1, 0, 0, 0), "global_batch is 0\nglobal_batch is at least 1."),
        ((1, 1, -1, 0), "seed is -1\nseed is at least 0."),
        ((1, 1, 0, -2), "step is -2\nstep is at least 0."),
    ],
)
def test_impossible_arguments_are_named(arguments, text):
    with pytest.raises(ConfigError) as caught:
        batch_indices(*arguments)
    assert str(caught.value) == text


def test_a_run_on_other_data_is_not_resumed():
    """Steps would hold other samples; the difference is named in samples and tokens."""
    from types import SimpleNamespace

    names = [data_name(SimpleNamespace(lengths=lengths)) for lengths in ([5, 9], [9, 5], [5, 9, 1])]
    state = {"seed": 0, "data": names[0]}
    require_same_order(state, seed=0, data=names[0])
    for other in names[1:]:
        with pytest.raises(ConfigError, match="made with data = 2 samples of 14 tokens") as caught:
            require_same_order(state, seed=0, data=other)
        assert f"this run has {other}" in str(caught.value)
    with pytest.raises(ConfigError, match="data = None"):
        require_same_order({"seed": 0}, seed=0, data=names[0])
