"""The attention module that Megatron builds in its layers: unpacks, refuses what would be wrong."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from flexcp.attention.group import group_attention
from flexcp.core.errors import UnsupportedError
from flexcp.integrations.megatron.batches import SeqParams


class FlexCPAttention(nn.Module):
    """Attention of local queries to the whole pack, under the task that `packed_seq_params` names.

    Takes the place of `core_attention` in a layer spec. It has no parameters. Heads are this process's share
    under tensor parallelism; its group is the processes with the same share in other cells.

    Args:
        config: of the model.
        layer_number: unused.
        attn_mask_type: must be causal; who attends to whom is in the layout.
        attention_type: must be `self`.
        attention_dropout: unused; the config is checked.
        softmax_scale: factor on the scores, by default width ** -0.5.
        options: what other versions of Megatron pass.

    Raises:
        UnsupportedError: another mask or cross attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if attention_type != "self":
            raise UnsupportedError(
                f"{attention_type} attention is not what FlexCP computes", "Use its own module for it."
            )
        _check_mask(attn_mask_type)
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, 1, Hq, D], rotated; T local rows, padding rows last.
            key: [T, 1, Hk, D], rotated, heads not repeated.
            value: [T, 1, Hk, D].
            attention_mask: must be None.
            attn_mask_type: must be causal.
            attention_bias: must be None.
            packed_seq_params: of the batch that the model was called with.

        Returns:
            [T, 1, Hq * D].

        Raises:
            UnsupportedError: the call is not of a FlexCP batch, or asks for more than causal attention.
        """
        context = params_of(packed_seq_params).context
        if attention_mask is not None or attention_bias is not None:
            raise UnsupportedError(
                "the model was called with an attention mask or bias, which FlexCP does not compute",
                'Pass attention_mask=None: it is batch["attention_mask"] of a FlexCP batch.',
            )
        if attn_mask_type is not None:
            _check_mask(attn_mask_type)
        rows = query.shape[0] - context.padding_rows
        q, k, v = (x[:rows, 0] for x in (query, key, value))
        out = group_attention(q, k, v, context.layout, context.exchange, scale=self._scale)
        context.calls += 1
        if context.padding_rows:
            out = torch.cat([out, out.new_zeros((context.padding_rows, *out.shape[1:]))])
        return out.flatten(1)[:, None]


def params_of(params: Any) -> SeqParams:
    """The task of a call.

    Raises:
        UnsupportedError: there is none.
    """
    if not isinstance(params, SeqParams):
        raise UnsupportedError(
            "the model was called without a FlexCP task",
            'Pass packed_seq_params=batch["packed_seq_params"] to the model in your forward step.',
        )
    return params


def _check_mask(kind: AttnMaskType) -> None:
    if kind not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise UnsupportedError(
            f"a layer asks for {kind.name} attention; FlexCP's is causal within samples",
            "Use a decoder-only model.",
        )


def with_attention(spec: Any) -> Any:
    """A copy of a layer spec with FlexCP's attention in it.

    Args:
        spec: of a layer (`get_gpt_layer_local_spec(…)`, `get_gpt_layer_with_transformer_engine_spec(…)`) or
            of a block (`get_gpt_decoder_block_spec(…)`).

    Raises:
        UnsupportedError: a layer without self-attention of the usual kind (Mamba, MLA, linear attention).
    """
    if getattr(spec, "layer_specs", None):
        block = copy.copy(spec)
        block.layer_specs = [with_attention(layer) for layer in spec.layer_specs]
        return block
    layer = copy.deepcopy(spec)
    attention = getattr(layer.submodules, "self_attention", None)
    parts: Any = getattr(attention, "submodules", None)
    if not (hasattr(parts, "core_attention") and hasattr(parts, "linear_qkv")):
        kind = getattr(getattr(attention, "module", layer.module), "__name__", "another module")
        raise UnsupportedError(
            f"a layer of the spec mixes tokens by {kind}, not by multi-head or grouped-query attention",
            "FlexCP trains models whose layers all use Megatron's SelfAttention.",
        )
    parts.core_attention = FlexCPAttention
    return layer
