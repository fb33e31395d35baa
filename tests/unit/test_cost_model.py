"""The time formula against numbers worked out by hand, and the presets against measurements."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import cost_models, samples

from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.core.sample import Sample
from flexcp.cost import CostModel, Link, Load, cost_model, hardware
from flexcp.cost.flops import ATTENTION_BACKWARD

LINK = Link(bytes_per_s=100.0, latency_s=0.25)
COST = CostModel(1.0, 2.0, 3.0, 4.0, 0.5, 10.0, 2, LINK, Link(10.0, 0.5), passes=3)


def test_one_rank_pays_no_communication():
    assert COST.task_s(Load(4, 10, 1, 4, 1), 1) == 10 + 8 + 3 + 4


def test_hidden_communication_costs_nothing():
    # 2 steps of (10 * 6 / 3 / 100 + 2 * 3 * 0.25) = 3.4 s hide behind 30 / 3 = 10 s of attention.
    assert COST.task_s(Load(6, 30, 1, 6, 1), 3) == 30 / 3 + 12 / 3 + 3 * 3 + 4 + 2 * 0.5


def test_exposed_communication_replaces_attention():
    # Across nodes: 2 steps of (10 * 6 / 3 / 10 + 2 * 3 * 0.5) = 10 s, attention only 1 s of it.
    assert COST.task_s(Load(6, 3, 1, 6, 1), 3, True) == pytest.approx(10 + 12 / 3 + 3 * 3 + 4 + 2 * 0.5)


def test_whole_samples_send_nothing_and_are_never_divided():
    load = Load.of(Sample(0, 4), whole_below_tokens=5) + Load.of(Sample(1, 4), whole_below_tokens=5)
    assert load == Load(8, 20, 2, 0, 0, 4)
    assert COST.task_s(load, 2) == 10 + 8 + 3 + 4
    assert COST.task_s(load, 8) == 10 + 8 + 3 + 4  # no faster than one sample on one rank


def test_full_attention_spans_cost_by_their_pairs():
    causal, full = Sample(0, 100), Sample(0, 100, ((0, 100),))
    extra = COST.task_s(Load.of(full, 0), 1) - COST.task_s(Load.of(causal, 0), 1)
    assert extra == 100 * 99 / 2
    assert full.eta == pytest.approx(99 / 101)


@given(samples(), cost_models(), st.integers(1, 12), st.integers(1, 12))
def test_the_table_holds_the_same_bits_as_single_calls(batch, cost, max_degree, per_node):
    load = sum((Load.of(sample, 50) for sample in batch), Load())
    times_s = cost.times_s(load, max_degree, per_node)
    assert times_s.tolist() == [cost.task_s(load, d, d > per_node) for d in range(1, max_degree + 1)]


@given(samples(max_size=6), cost_models(), st.integers(1, 12))
def test_a_pack_takes_no_less_than_any_of_its_samples(batch, cost, degree):
    loads = [Load.of(sample, 50) for sample in batch]
    together_s = cost.task_s(sum(loads, Load()), degree)
    assert all(together_s >= cost.task_s(load, degree) * (1 - 1e-12) for load in loads)


@given(samples(max_size=6), cost_models(), st.integers(1, 12), st.booleans())
def test_rank_seconds_are_least_on_one_rank(batch, cost, degree, crosses):
    load = sum((Load.of(sample, 50) for sample in batch), Load())
    assert degree * cost.task_s(load, degree, crosses) >= cost.task_s(load, 1) * (1 - 1e-12)


def test_coefficients_come_from_counted_work_and_named_rates():
    shape, h100 = model_shape("qwen3-8b"), hardware("h100")
    cost = cost_model(shape, h100)
    # 8192 tokens: 8.2e9 weights, 8 FLOPs each and token, at 0.55 * 989 TFLOP/s.
    assert cost.task_s(Load(8192, 0, 0), 1) == pytest.approx(8 * 7.4e9 * 8192 / (0.55 * 989e12), rel=0.05)
    # K and V in bf16 three times, their gradients once in fp32, 36 layers of 8 heads of 128.
    assert cost.kv_bytes_per_token == 2 * 36 * 8 * 128 * (3 * 2 + 4)
    plain = cost_model(shape, h100, checkpointing=False)
    assert plain.kv_bytes_per_token == 2 * 36 * 8 * 128 * (2 * 2 + 4)
    assert plain.token_s < cost.token_s


def test_half_a_core_takes_twice_as_long():
    shape, cpu = model_shape("llama3.2-1b"), hardware("cpu")
    load = Load.of(Sample(0, 1000), 0)
    whole_s = cost_model(shape, cpu).task_s(load, 1)
    assert cost_model(shape, cpu, speed=0.5).task_s(load, 1) == pytest.approx(2 * whole_s)


@pytest.mark.parametrize(
    ("tokens", "measured_s"), [(32, 9.1e-3), (128, 19.1e-3), (512, 72.5e-3), (2048, 0.449)]
)
def test_the_cpu_preset_predicts_what_was_measured(tokens, measured_s):
    tiny = ModelShape("tiny", 4, 128, 4, 2, 32, intermediate=384, vocab=512, tied=True)
    cost = cost_model(tiny, hardware("cpu"), checkpointing=False)
    assert cost.task_s(Load.of(Sample(0, tokens), 0), 1) == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(
    ("tokens", "measured_ms"), [(8192, 3.71), (16384, 13.5), (32768, 51.9), (65536, 206.3)]
)
def test_the_h100_preset_predicts_public_attention_times(tokens, measured_ms):
    """hao-ai-lab/DistCA, one layer of 64 heads x 128, forward, one document on one GPU."""
    layer = ModelShape("layer", 1, 8192, heads=64, kv_heads=8, head_dim=128, intermediate=1, vocab=1)
    cost = cost_model(layer, hardware("h100"), checkpointing=False)
    forward_s = cost.pair_s * Sample(0, tokens).attended_pairs / (1 + ATTENTION_BACKWARD)
    assert forward_s * 1e3 == pytest.approx(measured_ms, rel=0.17)


def test_values_can_be_sent_to_another_process():
    cost = cost_model(model_shape("qwen3-8b"), hardware("a100"))
    assert pickle.loads(pickle.dumps(cost)) == cost
    assert np.isfinite(cost.times_s(Load(1, 1, 1, 1, 1), 64, 8)).all()


def test_links_across_nodes_may_not_be_faster():
    fast, slow = Link(2e9, 1e-6), Link(1e9, 1e-6)
    with pytest.raises(ConfigError, match="faster than inside a node"):
        CostModel(1e-9, 1e-6, 0.0, 0.0, 0.0, 1.0, 1, slow, fast)
