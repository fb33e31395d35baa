"""Switches a model to FlexCP attention and back, and holds every forward to what it must be.

A model that drops the keyword, or a layer that goes its own way, would attend within the rows of one rank: a
loss that is merely a bit worse. So each call is looked at before it, and its attention counted after it.
"""

from __future__ import annotations

import inspect
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from flexcp.core.errors import UnsupportedError
from flexcp.integrations.transformers.attention import flexcp_attention, flexcp_mask, require_no_mask
from flexcp.integrations.transformers.config import check_supported, text_config
from flexcp.integrations.transformers.encoders import family_of
from flexcp.integrations.transformers.routing import balance_loss_sum
from flexcp.integrations.transformers.vision import require_encoder_outputs, vision_inputs
from flexcp.runtime.batches import TaskContext

# What is registered as an attention. Under the first name transformers makes no masks: to make one it asks an
# accelerator whether rows are packed, and the host waits for the answer. Models with windows need them.
NAME, WINDOWED = "flexcp", "flexcp_windowed"

_LAYERS = ("layers", "layer", "blocks")  # how models call them
_IMAGES = "Leave them to the data set: what its samples hold is encoded and cut inside model(**micro.inputs)."

# Keywords of a model call that would make it wrong, and what to do instead.
_REFUSED = {
    "labels": "Leave them out: step.backward(output, micro) has them, shifted before the sample was cut.",
    "past_key_values": "Training has no cache; leave it out.",
    "cache": "Training has no cache; leave it out.",
    "use_cache": "Training has no cache; leave it out.",
    "logits_to_keep": "Leave it out: every row of a rank has its target.",
    "pixel_values": _IMAGES,
    "pixel_values_videos": _IMAGES,
    "mm_encoder_outputs": _IMAGES,
}

# By weak values as well as keys: an `Enabled` holds its model, which holds its hooks, and so the `Enabled`.
_enabled: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Enabled]] = weakref.WeakKeyDictionary()


class Enabled:
    """A model that runs with FlexCP attention until `disable`, or to the end of its block; see `enable`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = inner = inner_model(model)
        check_supported(inner.config)
        self._config = text_config(inner.config)
        self._calls_before = 0
        self._selected = _selection(inner.config)
        name = NAME if getattr(self._config, "sliding_window", None) is None else WINDOWED
        AttentionInterface.register(name, flexcp_attention)
        AttentionMaskInterface.register(WINDOWED, flexcp_mask)
        self._family = family_of(inner.config)
        if self._family is not None:
            require_encoder_outputs(inner)
        # An encoder attends within its images, by attention of its own.
        inner.set_attn_implementation(name if self._family is None else {"text_config": name})
        if self._config._attn_implementation != name:
            inner.set_attn_implementation(self._selected)
            raise UnsupportedError(
                f"{type(inner).__name__} does not take its attention from the registry of transformers",
                "Models written before that registry cannot be used.",
            )
        self._parameters = tuple(inspect.signature(inner.forward).parameters)
        self._hooks = [
            inner.register_forward_pre_hook(self._before, with_kwargs=True),
            inner.register_forward_hook(self._after, with_kwargs=True),
        ]
        _enabled[inner] = weakref.ref(self)

    def disable(self) -> None:
        """Make the model what it was; may be called twice."""
        if _of(self._inner) is not self:
            return
        del _enabled[self._inner]
        for hook in self._hooks:
            hook.remove()
        self._inner.set_attn_implementation(self._selected)

    def __enter__(self) -> nn.Module:
        return self._model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(
        self, _: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Refuse what would be wrong; switch the cache off for this call; put the images of the rows in."""
        context = keywords.get("flexcp")
        if not isinstance(context, TaskContext):
            return None  # attention refuses, by the name of its layer
        self._calls_before = context.calls
        given = dict(zip(self._parameters, positional, strict=False)) | keywords
        require_no_mask(given.get("attention_mask"))
        for name, remedy in _REFUSED.items():
            value = keywords.get(name)
            if value is not None and value is not False and not (isinstance(value, int) and value == 0):
                raise UnsupportedError(f"the model was called with {name}", remedy)
        if keywords.get("position_ids") is None:
            raise UnsupportedError(
                "the model was called without position_ids, so rows would count from 0 on every rank",
                "Call the model as model(**micro.inputs).",
            )
        rows = _rows(positional, keywords)
        layout, member = context.layout, context.exchange.member
        if rows != layout.rows(member) + context.padding_rows:
            raise UnsupportedError(
                f"the model was called with {rows} rows; the plan gives {layout.rows(member)} of "
                f"{sum(sample.tokens for sample in layout.samples)} to this rank",
                "Call the model as model(**micro.inputs).",
            )
        _require_positions(keywords["position_ids"], context)
        images = {} if self._family is None else vision_inputs(self._inner, self._family, context, keywords)
        # Not in the config: a model that is saved while it trains keeps its own.
        return positional, {**keywords, "use_cache": False, **images}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(
        self, _: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        context = keywords.get("flexcp")
        if not isinstance(context, TaskContext):
            return
        calls, layers = context.calls - self._calls_before, self._config.num_hidden_layers
        if calls != layers:
            raise UnsupportedError(
                f"{calls} of {layers} layers of {type(self._inner).__name__} ran FlexCP attention",
                "A layer that takes its attention from elsewhere attends to the rows of one rank alone.",
            )
        logits = output.get("router_logits") if isinstance(output, dict) else None
        if logits:
            context.auxiliary_sum = balance_loss_sum(logits, context, self._config)


def enable(model: nn.Module) -> Enabled:
    """Run `model` with FlexCP attention from now on, or inside the block of a `with`.

    ::

        with enable(model):             enable(model)
            …                           …
                                        disable(model)

    The model is called as `model(**micro.inputs)`; afterwards it is what it was before. Nothing is patched:
    its names stay in transformers' registries, where they harm nobody.

    Args:
        model: a `PreTrainedModel`, bare or inside DistributedDataParallel, FSDP2, torch.compile or PEFT.

    Raises:
        UnsupportedError: not a transformers model, one whose attention would come out wrong, or enabled
            already.
    """
    if is_enabled(model):
        raise UnsupportedError("the model is enabled already", "Leave one of the two enable(model) out.")
    return Enabled(model)


def disable(model: nn.Module) -> None:
    """Undo `enable`; nothing if the model is not enabled."""
    enabled = _of(inner_model(model))
    if enabled is not None:
        enabled.disable()


def is_enabled(model: nn.Module) -> bool:
    """Whether the model runs with FlexCP attention."""
    return _of(inner_model(model)) is not None


def _of(inner: nn.Module) -> Enabled | None:
    """What `enable` made of a model."""
    found = _enabled.get(inner)
    return None if found is None else found()


def inner_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside whatever wraps it.

    Raises:
        UnsupportedError: there is none, several, or one behind virtual tokens that no plan knows of.
    """
    for wrapper in model.modules():
        adapters = getattr(wrapper, "peft_config", None)
        if isinstance(adapters, dict) and any(a.is_prompt_learning for a in adapters.values()):
            raise UnsupportedError(
                f"{type(wrapper).__name__} puts virtual tokens before every sample, which no plan counts",
                "Use LoRA or another method that adds no tokens.",
            )
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} is not a transformers model",
            "Call flexcp.attention.group_attention in your own attention layer.",
        )
    inside = {id(module) for module in found[0].modules()}
    others = [type(module).__name__ for module in found if id(module) not in inside]
    if others:
        raise UnsupportedError(
            f"{type(model).__name__} holds several models: {type(found[0]).__name__}, {others[0]}",
            "Enable and train one of them.",
        )
    return found[0]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a transformers model, of decoder and vision encoder, each a unit for FSDP2."""
    lists = [getattr(module, name, None) for module in model.modules() for name in _LAYERS]
    blocks = [block for layers in lists if isinstance(layers, nn.ModuleList) for block in layers]
    if blocks:
        return blocks
    raise UnsupportedError(f"{type(model).__name__} has no list of layers", "Pass the blocks yourself.")


def checkpoint_layers(model: PreTrainedModel, *, use_reentrant: bool = False) -> None:
    """Keep no activations inside decoder layers; their name for it changed within transformers 5."""
    switch: Any = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )
    switch({"use_reentrant": use_reentrant})


def _selection(config: Any) -> Any:
    """The attention now selected, in the form that `set_attn_implementation` takes."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    inner = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **inner} if inner else config._attn_implementation


def _require_positions(given: torch.Tensor, context: TaskContext) -> None:
    """Those of the plan, as `make_micro_batch` gives them.

    Compared where they lie on the host: a copy from an accelerator would wait for it.

    Raises:
        UnsupportedError: others, such as rows that were counted again.
    """
    if given.device.type != "cpu":
        return
    pieces = context.layout.pieces(context.exchange.member)
    parts = [torch.arange(piece.start, piece.stop) for piece in pieces]
    planned = torch.cat([*parts, torch.zeros(context.padding_rows, dtype=torch.int64)])
    if given.shape[-1] != len(planned) or not bool((given == planned).all()):
        raise UnsupportedError(
            "the model was called with other position_ids than the plan's",
            "Call the model as model(**micro.inputs): positions are those of the uncut sample.",
        )


def _rows(positional: tuple[Any, ...], keywords: dict[str, Any]) -> int:
    """Rows of the call: of its tokens or of their embeddings."""
    for name in ("input_ids", "inputs_embeds"):
        if keywords.get(name) is not None:
            return int(keywords[name].shape[1])
    return int(positional[0].shape[1]) if positional else 0
