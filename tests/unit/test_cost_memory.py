"""Counted FLOPs and bytes against hand calculation and against published orders of magnitude."""

import dataclasses
from dataclasses import replace

import pytest

from flexcp.core.errors import InfeasibleError, UnknownNameError
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.cost import HARDWARE, hardware, tokens_per_rank
from flexcp.cost.flops import flops_per_pair, flops_per_token
from flexcp.cost.memory import SHARDINGS, Memory, Moment, memory_model, model_state_bytes
from flexcp.cost.presets import KINDS

QWEN = model_shape("qwen3-8b")


def test_flops_are_six_per_weight_without_the_embedding_and_eight_with_recomputation():
    computed = QWEN.parameters - QWEN.vocab * QWEN.hidden
    assert flops_per_token(QWEN, checkpointing=False) == 6 * computed
    layers = QWEN.layers * QWEN.layer_parameters
    assert flops_per_token(QWEN) == 6 * computed + 2 * layers


def test_flops_per_pair_count_two_products_forward_and_five_backward():
    channels = QWEN.layers * QWEN.heads * QWEN.head_dim
    assert flops_per_pair(QWEN, checkpointing=False) == 2 * channels * 7
    assert flops_per_pair(QWEN) == 2 * channels * 9


def test_a_tied_head_is_still_computed():
    tied = model_shape("llama3.2-1b")
    assert flops_per_token(tied, checkpointing=False) == 6 * tied.parameters


@pytest.mark.parametrize(("sharding", "bytes_per_weight"), [("ddp", 18), ("zero1", 6 + 12 / 64)])
def test_states_in_bf16_are_weights_fp32_gradients_and_adam(sharding, bytes_per_weight):
    assert model_state_bytes(QWEN, sharding, 64, 2) == pytest.approx(QWEN.parameters * bytes_per_weight)


def test_states_in_fp32_have_no_master_copy():
    assert model_state_bytes(QWEN, "ddp", 1, 4) == QWEN.parameters * 16


def test_more_sharding_needs_less_memory():
    ddp, zero1, zero2, zero3 = (model_state_bytes(QWEN, s, 64, 2) for s in SHARDINGS)
    assert ddp > zero1 > zero2 > zero3 > 0


def test_zero2_shards_the_gradients_but_those_of_a_layer():
    freed = model_state_bytes(QWEN, "zero1", 64, 2) - model_state_bytes(QWEN, "zero2", 64, 2)
    assert freed == pytest.approx(4 * QWEN.parameters * 63 / 64 - 4 * QWEN.layer_parameters)


def test_sharded_fp32_weights_stay_stored_beside_those_that_compute():
    assert model_state_bytes(QWEN, "zero1", 4, 4) == QWEN.parameters * (4 + 4 + 12 / 4)


# One layer: q and k have 6 channels, v and the output 2 and 4.
TINY = ModelShape("tiny", 1, 4, heads=2, kv_heads=1, head_dim=2, intermediate=16, vocab=10)


def test_a_token_by_hand_in_fp32():
    """Norms 2 x (8 + 4) x 4; of q and k 8 x 6; q, k, v, output 4 x 12; feed-forward 4 x 4 x 16: 448."""
    loss, layer, _ = memory_model(TINY, 1, element_bytes=4, checkpointing=False).moments
    kept = 2 * 12 * 4 + 8 * 6 + 4 * 12 + 16 * 16
    assert loss.bytes_per_token == kept + 12 * 4 + 2 * 4 * 10  # last norm, logits and their gradient
    assert layer.bytes_per_token == kept + 4 * 10 + 4 * (4 + 2 * 16)  # logits, gradients of the layer


def test_a_token_by_hand_with_checkpointing():
    """A layer keeps its input alone, and is there as a whole when its turn comes."""
    shape = replace(TINY, layers=5)
    _, whole, _ = memory_model(TINY, 1, element_bytes=4, checkpointing=False).moments
    loss, layer, _ = memory_model(shape, 1, element_bytes=4, checkpointing=True).moments
    assert loss.bytes_per_token == 5 * 4 * 4 + 12 * 4 + 2 * 4 * 10
    assert layer.bytes_per_token == 5 * 4 * 4 + whole.bytes_per_token


def test_norms_are_widened_in_bf16():
    loss, _, _ = memory_model(TINY, 1, element_bytes=2, checkpointing=False).moments
    assert loss.bytes_per_token == 2 * (6 + 2) * 4 + 6 * 6 + 2 * 12 + 8 * 16 + (6 + 2) * 4 + 2 * 2 * 10


def test_ring_and_attention_count_where_the_feed_forward_is_narrow():
    wide, narrow = (
        memory_model(replace(TINY, intermediate=width, heads=64), 1, element_bytes=4).moments[1]
        for width in (16, 1)
    )
    assert wide.bytes_per_token == narrow.bytes_per_token  # the peak is that of attention alike


def test_checkpointing_saves_most_of_the_activations():
    kept = memory_model(QWEN, 64, element_bytes=2, checkpointing=False)
    assert memory_model(QWEN, 64, element_bytes=2).bytes_per_token < kept.bytes_per_token / 5


def test_peak_is_the_largest_moment_and_tokens_turn_it_round():
    memory = Memory(1.0, (Moment("a", 10.0, 1.0), Moment("b", 4.0, 2.0), Moment("c", 12.0)))
    assert [memory.peak(tokens).name for tokens in (1, 3, 7)] == ["c", "a", "b"]
    assert memory.peak_bytes(7) == 18.0
    assert [memory.tokens(budget) for budget in (11.9, 12.0, 17.9, 18.0)] == [0, 2, 6, 7]


def test_tokens_per_rank_is_exactly_what_the_budget_holds():
    memory = memory_model(QWEN, 64, element_bytes=2)
    tokens = tokens_per_rank(QWEN, hardware("h100"), 64)
    assert memory.peak_bytes(tokens) <= 72e9 < memory.peak_bytes(tokens + 1)


def test_measured_tokens_scale_what_fits_and_leave_the_states():
    h100 = hardware("h100")
    once, twice = (tokens_per_rank(QWEN, replace(h100, token_scale=scale), 64) for scale in (1.0, 2.0))
    assert twice == pytest.approx(once / 2, abs=1)


def test_the_papers_machine_holds_thousands_of_tokens():
    # 64 ranks of 64 GB ran Qwen3-VL at 8192 tokens a rank; whole weights and gradients leave half of that.
    assert 4096 <= tokens_per_rank(QWEN, hardware("ascend-910c"), 64) < 8192


def test_no_room_is_an_error_with_the_numbers():
    with pytest.raises(InfeasibleError, match=r"72\.0 GB usable, 147\.\d GB model states \(ddp, 8 ranks\)"):
        tokens_per_rank(QWEN, hardware("h100"), 8, sharding="ddp")


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'h100'"):
        hardware("h-100")
    with pytest.raises(UnknownNameError, match="unknown sharding 'zero4'"):
        model_state_bytes(QWEN, "zero4", 8, 2)


@pytest.mark.parametrize("name", HARDWARE)
def test_every_preset_says_where_its_numbers_are_from_and_is_possible(name):
    preset = hardware(name)
    numbers = [number for origin in preset.origins for number in origin.numbers.split()]
    fields = {field.name for field in dataclasses.fields(preset)} - {"name", "origins", "token_scale"}
    assert sorted(numbers) == sorted(fields)  # each once
    assert all(origin.kind in KINDS and len(origin.source) > 10 for origin in preset.origins)
    assert len(preset.described()) == len(preset.origins)
    assert 0 < preset.attention_efficiency <= 1
    assert 0 < preset.matmul_efficiency <= 1
    assert preset.inter_bytes_per_s <= preset.intra_bytes_per_s
    assert preset.inter_latency_s >= preset.intra_latency_s
