"""The attention function that transformers calls: unpacks its layout, refuses what would be wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexcp.attention.group import group_attention
from flexcp.core.errors import UnsupportedError
from flexcp.runtime.batches import TaskContext

# Keywords that a model may pass on without changing what attention computes.
_HARMLESS = {
    "flexcp",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}


def flexcp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Ring attention under the task named by the keyword `flexcp` of the model call.

    Args:
        module: the attention layer that calls.
        query: [1, Hq, T, D], rotated; T local rows, padding rows last.
        key: [1, Hk, T, D], rotated, heads not repeated.
        value: [1, Hk, T, D].
        attention_mask: must be None; who attends to whom is in the layout.
        scaling: factor on the scores.
        dropout: must be 0.
        options: other keywords of the model call.

    Returns:
        [1, T, Hq, D] and None for the weights, which are never materialised.

    Raises:
        UnsupportedError: an option that changes attention and that FlexCP does not compute.
    """
    context = _context(module, options)
    _refuse(module, attention_mask, dropout, options)
    rows = query.shape[2] - context.padding_rows
    q, k, v = (_lowered(x[0, :, :rows].transpose(0, 1)) for x in (query, key, value))
    out = group_attention(q, k, v, context.layout, context.exchange, scale=scaling)
    context.calls += 1
    if context.padding_rows:
        out = torch.cat([out, out.new_zeros((context.padding_rows, *out.shape[1:]))])
    return out[None], None


def flexcp_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """The mask that transformers asks for before the layers: none, and one that was given is refused.

    Without this, transformers drops a mask of padded tokens in silence.
    """
    if attention_mask is not None:
        raise UnsupportedError(
            "the model was called with an attention_mask, which FlexCP attention does not compute",
            "Leave it out: packs have no padding, and who attends to whom is in the plan.",
        )


def _lowered(x: Tensor) -> Tensor:
    """Rotation leaves q and k in fp32 under autocast; torch's own attention casts them back, so here too."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _context(module: nn.Module, options: dict[str, Any]) -> TaskContext:
    context = options.get("flexcp")
    if not isinstance(context, TaskContext):
        raise UnsupportedError(
            f"{type(module).__name__} was called without a FlexCP task",
            "Call the model as model(**micro.inputs), inside `with enable(model)`.",
        )
    return context


def _refuse(module: nn.Module, mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    options = dict(options)
    causal = options.pop("is_causal", None)
    refused = {name: value for name, value in options.items() if name not in _HARMLESS}
    named = [
        f"{name}={value!r}" for name, value in refused.items() if value is not None and value is not False
    ]
    if mask is not None:
        named.append("attention_mask")
    if dropout:
        named.append(f"dropout={dropout}")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        named.append("is_causal=False")
    if named:
        raise UnsupportedError(
            f"{type(module).__name__} asks for {', '.join(named)}, which FlexCP attention does not compute",
            "Switch the option off in the model's config; FlexCP never drops an option in silence.",
        )
