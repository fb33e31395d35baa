"""The auxiliary loss of mixtures of experts, of whole samples: the same for every plan and every degree.

Megatron's own compares the tokens of a micro-batch with each other, so it would depend on how samples are
packed and cut. Here a sample is compared with itself, which is what one process that runs one sample a
micro-batch does: E / k * sum over experts of (share of its tokens that chose the expert) * (sum of their
scores for it), as in the Switch transformer (arXiv 2101.03961), weighted by the tokens of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from torch import Tensor

from flexcp.attention.exchange import group_sum
from flexcp.core.errors import ConfigError, UnsupportedError
from flexcp.integrations.megatron.batches import SeqParams

_ADDED = "flexcp_balancing_loss"  # attribute of a layer


class BalancingLoss:
    """Adds the loss to what one router gives, by hooks: one that hears of the task, one that adds.

    The layer is called with the task, also when it is recomputed; its router is called inside of that.

    Args:
        layer: with a router, which computes no auxiliary loss of its own.
        coefficient: Megatron's `moe_aux_loss_coeff`.

    Attributes:
        coefficient: the same.
    """

    def __init__(self, layer: Any, coefficient: float) -> None:
        self.coefficient = coefficient
        self._params: SeqParams | None = None
        layer.register_forward_pre_hook(self._hear, with_kwargs=True)
        layer.mlp.router.register_forward_hook(self._add)

    def _hear(self, layer: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        params = options.get("packed_seq_params")
        self._params = params if isinstance(params, SeqParams) else None

    def _add(self, router: Any, arguments: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Any:
        """The router's output, with the loss attached to its probabilities."""
        if not (router.training and torch.is_grad_enabled()):
            return None
        if self._params is None:
            raise UnsupportedError(
                "a layer was called without the keyword packed_seq_params: experts would go unbalanced",
                "Call layers as Megatron's TransformerBlock does, or leave moe_aux_loss_coeff out.",
            )
        probabilities, routing = output
        logits = router.gating(arguments[0]).flatten(0, -2)
        chosen, scores = compute_routing_scores_for_aux_loss(logits, router.topk, router.score_function)
        split = router.config.sequence_parallel
        group = parallel_state.get_tensor_model_parallel_group() if split else None
        samples = _own_rows(self._params.sample_of_row, group)
        tokens = self._params.sample_tokens
        counts = chosen.new_zeros(len(tokens), scores.shape[-1], dtype=torch.float32)
        counts.index_add_(0, samples, chosen.float())
        if group is not None:
            dist.all_reduce(counts, group=group)
        # The last row is that of padding, which has no share in anything.
        shares = group_sum(counts, self._params.context.exchange) / tokens[:, None]
        loss = self.coefficient * scores.shape[-1] / router.topk * (shares[samples] * scores).sum()
        return MoEAuxLossAutoScaler.apply(probabilities, loss), routing


def _own_rows(samples: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Under sequence parallelism each process of a tensor-parallel group routes its share of the rows."""
    return samples if group is None else samples.chunk(group.size())[group.rank()]


def add_balancing_loss(model: Any, coefficient: float) -> None:
    """Let every mixture of experts of a model add the loss; once, however often it is called.

    Raises:
        UnsupportedError: routers are recomputed apart from their layers.
        ConfigError: they add it with another coefficient already.
    """
    config = model.config
    if config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ()):
        raise UnsupportedError(
            "recompute_modules has 'moe': routers would be recomputed without the layer that knows the task",
            'Recompute whole layers, or leave "moe" out.',
        )
    for layer in model.decoder.layers:
        if not hasattr(layer.mlp, "router"):
            continue
        added: BalancingLoss | None = getattr(layer, _ADDED, None)
        if added is None:
            setattr(layer, _ADDED, BalancingLoss(layer, coefficient))
        elif added.coefficient != coefficient:
            raise ConfigError(
                f"moe_aux_loss_coeff is {coefficient}; the model was enabled with {added.coefficient}",
                "Enable a model once, in its provider.",
            )
