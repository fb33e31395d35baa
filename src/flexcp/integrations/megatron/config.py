"""Reads what FlexCP needs from a Megatron config, and refuses configs it would compute wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flexcp.core.errors import ConfigError, UnsupportedError
from flexcp.core.model_shape import ModelShape, feed_forward


def shape_of(config: Any, vocab: int, *, tied: bool = False) -> ModelShape:
    """The shape of a GPT model, for cost models; of a mixture of experts what one token meets.

    Args:
        config: a `TransformerConfig`.
        vocab: vocabulary size, which is not in it.
        tied: what the `GPTModel` gets as `share_embeddings_and_output_weights`; its default is this one's.
    """
    experts, layers = config.num_moe_experts or 0, config.num_layers
    every = config.moe_layer_freq
    mixed = sum(every) if isinstance(every, list) else -(-layers // every)
    intermediate, idle = feed_forward(
        config.hidden_size,
        layers,
        config.ffn_hidden_size,
        gated=config.gated_linear_unit,
        experts=experts,
        chosen=config.moe_router_topk,
        expert_width=config.moe_ffn_hidden_size or config.ffn_hidden_size,
        shared_width=config.moe_shared_expert_intermediate_size or 0,
        dense_layers=layers - mixed,
    )
    return ModelShape(
        name="megatron-gpt",
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        extra_parameters=idle,
    )


def check_supported(config: Any) -> None:
    """Refuse by name, before step 0, what would be wrong under a changing degree.

    Raises:
        UnsupportedError: an option that FlexCP does not compute; all of them are named.
        ConfigError: a setting that must have another value.
    """
    refused = list(_refused(config))
    if refused:
        raise UnsupportedError(
            f"FlexCP does not train with {', '.join(refused)}",
            "Switch it off in the TransformerConfig, or train without FlexCP.",
        )
    if not config.calculate_per_token_loss:
        raise ConfigError(
            "calculate_per_token_loss is False: Megatron would average over micro-batches of unequal size",
            "Set calculate_per_token_loss=True (--calculate-per-token-loss).",
        )
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        raise ConfigError(
            "variable_seq_lengths is False: pipeline stages would expect micro-batches of one length",
            'Set variable_seq_lengths=True and moe_token_dispatcher_type="alltoall", which it asks for.',
        )


def _refused(config: Any) -> Iterator[str]:
    """What is switched on and not supported; names that a version lacks count as off."""

    def value(name: str) -> Any:
        return getattr(config, name, None)

    if (value("context_parallel_size") or 1) > 1:
        size = value("context_parallel_size")
        yield f"context_parallel_size={size} (groups are made of data-parallel ranks)"
    for name in ("hybrid_context_parallel", "dynamic_context_parallel"):
        if value(name):
            yield f"{name} (Megatron's own planner)"
    if value("virtual_pipeline_model_parallel_size"):
        yield "interleaved pipelines (virtual_pipeline_model_parallel_size)"
    if value("multi_latent_attention"):
        yield "multi-latent attention (MLA)"
    if value("is_hybrid_model"):
        yield "Mamba layers (is_hybrid_model)"
    if value("experimental_attention_variant"):
        yield f"experimental_attention_variant={value('experimental_attention_variant')!r}"
    if value("fp8") or value("fp4"):
        yield f"FP8 (fp8={value('fp8')!r}, fp4={value('fp4')!r})"
    graphs = value("cuda_graph_impl") not in (None, "none")
    if value("enable_cuda_graph") or value("external_cuda_graph") or graphs:
        yield "CUDA graphs (lengths change with every micro-batch)"
    if value("attention_dropout"):
        yield f"attention_dropout={value('attention_dropout')}"
    for name in ("window_size", "mtp_num_layers", "qk_clip", "log_max_attention_logit", "flash_decode"):
        if value(name):
            yield f"{name}={value(name)!r}"
    if value("softmax_type") not in (None, "vanilla"):
        yield f"softmax_type={value('softmax_type')!r}"
    yield from _refused_experts(config)


def _refused_experts(config: Any) -> Iterator[str]:
    """Mixture of experts: routing as such is per token; what compares tokens of a micro-batch is not."""
    if not config.num_moe_experts:
        return
    coefficients = config.moe_aux_loss_coeff
    if any(coefficients if isinstance(coefficients, list) else [coefficients]):
        yield (
            f"moe_aux_loss_coeff={coefficients} in the config, which would balance the local rows alone "
            "(flexcp.megatron.enable(model, moe_aux_loss_coeff=…) balances whole samples)"
        )
    for name in ("moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_input_jitter_eps"):
        if getattr(config, name, None):
            yield f"{name}={getattr(config, name)}"
    if getattr(config, "moe_router_enable_expert_bias", False):
        yield "moe_router_enable_expert_bias (it would count rows of padding)"
    if config.moe_router_load_balancing_type == "sinkhorn":
        yield "moe_router_load_balancing_type='sinkhorn'"
