"""The attention function that transformers calls: unpacks its layout, refuses what would be wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
    "output_router_logits",
    "return_dict",
}


# Messages and plans are not for a graph; the layers around it are.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def flexcp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a group under the task named by the keyword `flexcp` of the model call.

    Args:
        module: the attention layer that calls.
        query: [1, Hq, T, D], rotated; T local rows, padding rows last.
        key: [1, Hk, T, D], rotated, heads not repeated.
        value: [1, Hk, T, Dv].
        attention_mask: what `flexcp_mask` gave; who attends to whom is in the layout.
        scaling: factor on the scores.
        dropout: must be 0.
        sliding_window: rows that a row sees, itself the last of them.
        softcap: bound of the scores, see `group_attention`.
        s_aux: sinks [Hq].
        options: other keywords of the model call.

    Returns:
        [1, T, Hq, Dv] and None for the weights, which are never materialised.

    Raises:
        UnsupportedError: an option that changes attention and that FlexCP does not compute.
    """
    context = _context(module, options)
    window = _window(module, attention_mask, sliding_window)
    _refuse(module, dropout, options)
    rows = query.shape[2] - context.padding_rows
    width = max(query.shape[3], value.shape[3])
    q, k, v = (_lowered(_widened(x[0, :, :rows].transpose(0, 1), width)) for x in (query, key, value))
    out = group_attention(
        q,
        k,
        v,
        context.layout,
        context.exchange,
        scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )[..., : value.shape[3]]
    context.calls += 1
    if context.padding_rows:
        out = torch.cat([out, out.new_zeros((context.padding_rows, *out.shape[1:]))])
    return out[None], None


def flexcp_mask(
    *_: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **__: Any
) -> Tensor | None:
    """The mask that transformers asks for before the layers: none, or the number of rows of a window.

    A layer may not say its window in its call and lean on the mask instead, so the mask must carry it.
    """
    require_no_mask(attention_mask)
    return None if local_size is None else torch.tensor(local_size)


def require_no_mask(given: Any) -> None:
    """Transformers would drop a mask of padded tokens in silence.

    Raises:
        UnsupportedError: there is a mask.
    """
    if given is not None:
        raise UnsupportedError(
            "the model was called with an attention_mask, which FlexCP attention does not compute",
            "Leave it out: packs have no padding, and who attends to whom is in the plan.",
        )


def _window(module: nn.Module, mask: Tensor | None, said: int | None) -> int | None:
    """The window of a layer, which its mask and its call must agree on."""
    if mask is not None and mask.dim():
        raise UnsupportedError(
            f"{type(module).__name__} asks for attention_mask, which FlexCP attention does not compute",
            "Switch the option off in the model's config; FlexCP never drops an option in silence.",
        )
    masked = None if mask is None else int(mask)
    if masked is None or said is None or masked == said:
        return said if masked is None else masked
    raise UnsupportedError(
        f"{type(module).__name__} has a window of {said} rows and a mask of {masked}",
        "Set one sliding_window in the model's config.",
    )


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros up to the width of all three, where values have another than keys (MLA): no score changes."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


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


def _refuse(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    options = dict(options)
    causal = options.pop("is_causal", None)
    refused = {name: value for name, value in options.items() if name not in _HARMLESS}
    named = [
        f"{name}={'a tensor' if isinstance(value, Tensor) else repr(value)}"
        for name, value in refused.items()
        if value is not None and value is not False
    ]
    if dropout:
        named.append(f"dropout={dropout}")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        named.append("is_causal=False")
    if named:
        raise UnsupportedError(
            f"{type(module).__name__} asks for {', '.join(named)}, which FlexCP attention does not compute",
            "Switch the option off in the model's config; FlexCP never drops an option in silence.",
        )
