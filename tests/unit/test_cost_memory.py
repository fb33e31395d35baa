"""Counted FLOPs and bytes against hand calculation and against published orders of magnitude."""

import pytest

from flexcp.core.errors import InfeasibleError, UnknownNameError
from flexcp.core.model_shape import model_shape
from flexcp.cost import HARDWARE, hardware, tokens_per_rank
from flexcp.cost.flops import flops_per_pair, flops_per_token
from flexcp.cost.memory import activation_bytes_per_token, logits_bytes_per_token, model_state_bytes

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
    ddp, zero1, zero3 = (model_state_bytes(QWEN, s, 64, 2) for s in ("ddp", "zero1", "zero3"))
    assert ddp > zero1 > zero3 > 0


def test_checkpointing_saves_most_of_the_activations():
    kept = activation_bytes_per_token(QWEN, 2, checkpointing=False)
    assert activation_bytes_per_token(QWEN, 2) < kept / 5


def test_logits_and_their_gradient_are_kept_in_the_training_precision():
    assert logits_bytes_per_token(QWEN, 2) == QWEN.vocab * 4


def test_tokens_per_rank_is_exactly_what_the_budget_holds():
    h100 = hardware("h100")
    tokens = tokens_per_rank(QWEN, h100, 64)
    used = model_state_bytes(QWEN, "zero1", 64, 2) + 1024 * 3 * 4 * QWEN.vocab
    per_token = activation_bytes_per_token(QWEN, 2) + logits_bytes_per_token(QWEN, 2)
    assert used + tokens * per_token <= 72e9 < used + (tokens + 1) * per_token


def test_the_papers_machine_holds_thousands_of_tokens():
    # 64 ranks of 64 GB ran Qwen3-VL at 8192 tokens a rank; whole weights and gradients leave half of that.
    assert 4096 <= tokens_per_rank(QWEN, hardware("ascend-910c"), 64) < 8192


def test_no_room_is_an_error_with_the_numbers():
    with pytest.raises(InfeasibleError, match=r"72\.0 GB usable, 147\.\d GB model states \(ddp, 8 ranks\)"):
        tokens_per_rank(QWEN, hardware("h100"), 8, sharding="ddp")


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'h100'"):
        hardware("h-100")
    with pytest.raises(UnknownNameError, match="unknown sharding 'zero2'"):
        model_state_bytes(QWEN, "zero2", 8, 2)


@pytest.mark.parametrize("name", HARDWARE)
def test_every_preset_says_where_its_numbers_are_from_and_is_possible(name):
    preset = hardware(name)
    assert len(preset.origin) > 100
    assert 0 < preset.attention_efficiency <= 1
    assert 0 < preset.matmul_efficiency <= 1
    assert preset.inter_bytes_per_s <= preset.intra_bytes_per_s
    assert preset.inter_latency_s >= preset.intra_latency_s
