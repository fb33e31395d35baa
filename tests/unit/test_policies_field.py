"""What people met in the field (D60 to D64), as the planner must answer it."""

import json
from pathlib import Path

import numpy as np
import pytest

from flexcp.cli import main
from flexcp.core.cluster import Cluster
from flexcp.core.model_shape import MODEL_SHAPES, model_shape
from flexcp.core.sample import Sample, samples_from_lengths
from flexcp.cost import HARDWARE, cost_model, hardware
from flexcp.cost.flops import flops_per_pair, flops_per_token
from flexcp.cost.model import Load
from flexcp.planner import POLICIES, check, make_plan

COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
LENGTHS = Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json"


def pack_s(lengths: list[int], degree: int = 1) -> float:
    load = sum((Load.of(sample, 512) for sample in samples_from_lengths(lengths)), Load())
    return COST.task_s(load, degree)


def test_d60_equal_tokens_are_not_equal_time():
    """D60: one of 32k against 32 of 1k: the same tokens, attention of 32 times the pairs."""
    long_s, short_s = pack_s([32_768]), pack_s([1024] * 32)
    attention_s = COST.pair_s * (32_768 * 32_769 / 2 - 32 * 1024 * 1025 / 2)

    assert long_s - short_s == pytest.approx(attention_s - 31 * COST.sample_s)
    assert long_s > 1.25 * short_s


# Sums of l and of l², and milliseconds of attention on one H100, of packs of 65,536 tokens: every 14th row at
# tp = cp = 1 of hao-ai-lab/DistCA @ 323af656, benchmarks/_250614_attndist/attn-dist_multimodal-64k.psv
# (Apache-2.0).
MEASURED: list[tuple[int, int, float]] = [
    (65536, 4291560776, 196.96),
    (65536, 1733079754, 81.91),
    (65536, 2413664716, 111.3),
    (65536, 4172890306, 193.08),
    (65536, 3161334098, 148.19),
    (65536, 3176124026, 149.48),
    (65536, 3532757896, 164.92),
    (65536, 3925471360, 180.61),
    (65536, 2804151048, 129.87),
    (65536, 2846414920, 132.91),
    (65536, 3758105416, 174.85),
    (65536, 3020003782, 141.9),
]


def test_d61_pairs_alone_explain_measured_attention():
    """D61: the plain sum of squares, fitted on half the rows, predicts the other; tokens alone do not."""
    rows = np.array(MEASURED)
    fit, held_out = rows[::2], rows[1::2]
    pair_ms = (fit[:, 1] @ fit[:, 2]) / (fit[:, 1] @ fit[:, 1])
    token_ms = (fit[:, 0] @ fit[:, 2]) / (fit[:, 0] @ fit[:, 0])
    by_pairs = np.abs(pair_ms * held_out[:, 1] / held_out[:, 2] - 1)
    by_tokens = np.abs(token_ms * held_out[:, 0] / held_out[:, 2] - 1)

    assert by_pairs.max() < 0.05
    assert by_tokens.max() > 0.3


@pytest.mark.parametrize("device", HARDWARE)
@pytest.mark.parametrize("model", MODEL_SHAPES)
def test_d62_no_prediction_exceeds_the_peak(device, model):
    """D62: with causal pairs counted as they are, no pack implies more than the peak of its ranks."""
    shape, machine = model_shape(model), hardware(device)
    cost = cost_model(shape, machine)
    for tokens in (1, 512, 8192, 131_072):
        load = Load.of(Sample(0, tokens), 512)
        flops = flops_per_pair(shape) * load.pairs + flops_per_token(shape) * load.tokens
        for degree in (1, 3, 8, 64):
            assert flops / (cost.task_s(load, degree) * degree * machine.flops_per_s) < 1


def test_d63_bins_bound_padding_and_imbalance_are_told(capfd):
    """D63: what a survey of packing heuristics needs: bins, a lower bound, no padding, idle time."""
    arguments = ["plan", str(LENGTHS), "--model", "qwen3-8b", "--ranks", "64", "--tokens-per-rank", "8192"]
    assert main([*arguments, "--json"]) == 0
    body = json.loads(capfd.readouterr().out)
    for policy in body["policies"].values():
        if "refusal" not in policy:
            assert sum(policy["degrees"].values()) > 0
            assert policy["bound_s"] <= policy["step_s"]
            assert 0 <= policy["idle_share"] < 1
    plan = make_plan(samples_from_lengths([700, 3, 5000]), Cluster(4, 2048), COST)
    assert sum(plan.layout(task).rows(m) for task in plan.tasks for m in range(task.degree)) == 5703


@pytest.mark.parametrize("mode", ["free-running", "lockstep"])
def test_d64_three_hundred_six_thousand_fifty_thousand(mode):
    """D64: the three lengths, alone and sixteen times: every policy serves, none beats flexcp."""
    for copies, ranks in ((1, 8), (16, 32)):
        samples = samples_from_lengths([300, 6_000, 50_000] * copies)
        cluster = Cluster(ranks, 8192)
        plans = {name: make_plan(samples, cluster, COST, policy=name, mode=mode) for name in POLICIES}
        for plan in plans.values():
            assert check(plan, COST) == ()
            assert plans["flexcp"].step_s <= plan.step_s * (1 + 1e-9)
        assert plans["flexcp"].gap < 1.06
