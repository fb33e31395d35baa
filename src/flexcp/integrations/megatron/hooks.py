"""Makes a built model ready for batches of local rows."""

from __future__ import annotations

from typing import Any

from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import nn

from flexcp.core.errors import UnsupportedError
from flexcp.integrations.megatron.attention import FlexCPAttention, params_of
from flexcp.integrations.megatron.batches import SeqParams
from flexcp.integrations.megatron.config import check_supported
from flexcp.integrations.megatron.experts import add_balancing_loss


class LocalRotary(nn.Module):
    """A model's rotary embedding, by the positions of the local rows in their uncut samples.

    Megatron asks first how long its table must be and then for the table; the task stands for the length.

    Args:
        inner: the model's own, which knows base and scaling.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> SeqParams:
        """What knows the positions; on every pipeline stage."""
        return params_of(packed_seq_params)

    def forward(self, params: SeqParams, **_: Any) -> Any:
        """One row for each local row: [T, 1, 1, D], or what the inner one gives beside its table."""
        table, positions = self.inner(params.table_rows), params.positions
        return (table[0][positions], *table[1:]) if isinstance(table, tuple) else table[positions]


def enable(model: Any, *, moe_aux_loss_coeff: float = 0.0) -> Any:
    """Make a GPT model ready, in place; call it in the model provider, before any wrapping.

    A second call changes nothing.

    Args:
        model: built with a spec of `with_attention`.
        moe_aux_loss_coeff: weight of the auxiliary loss of mixtures of experts (`experts`), in place of that
            of the config, which must be 0.

    Returns:
        The same model.

    Raises:
        UnsupportedError: not a GPT model, an option that would be computed wrongly
            (`config.check_supported`), or layers whose attention is not FlexCP's.
        ConfigError: enabled before with another weight of the auxiliary loss.
    """
    if not isinstance(model, GPTModel):
        raise UnsupportedError(
            f"{type(model).__name__} is not a GPTModel",
            "Models with state-space or other token mixing layers are not supported.",
        )
    check_supported(model.config)
    for layer in model.decoder.layers:
        attention = getattr(layer, "self_attention", None)
        core = getattr(attention, "core_attention", None)
        if not isinstance(core, FlexCPAttention):
            raise UnsupportedError(
                f"layer {layer.layer_number} has the attention {type(core or attention).__name__}",
                "Build the model with flexcp.megatron.with_attention(spec).",
            )
    rotary = getattr(model, "rotary_pos_emb", None)
    if isinstance(rotary, MultimodalRotaryEmbedding):
        raise UnsupportedError(
            "position_embedding_type 'mrope' needs three positions a token, which FlexCP batches lack",
            "Use 'rope', 'yarn', 'learned_absolute' or 'none'.",
        )
    if rotary is not None and not isinstance(rotary, LocalRotary):
        model.rotary_pos_emb = LocalRotary(rotary)
    if moe_aux_loss_coeff:
        add_balancing_loss(model, moe_aux_loss_coeff)
    return model
