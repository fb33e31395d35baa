"""The auxiliary loss that balances the experts of a mixture, under any degree.

transformers computes it from the rows of one call, where it would depend on what a rank happens to hold. Here
it is that of every sample run alone (its mean over a batch, weighted by tokens), so no plan changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexcp.attention.exchange import group_sum
from flexcp.core.errors import UnsupportedError
from flexcp.integrations.transformers.config import num_experts
from flexcp.runtime.batches import TaskContext


def balance_loss_sum(router_logits: Sequence[Tensor], context: TaskContext, config: Any) -> Tensor | None:
    """This rank's share of Σ over samples of tokens × coefficient × loss; over the group the shares add up.

    The loss of a sample is experts · Σ_e f_e · p_e, with f_e the experts chosen for a token and p_e the mean
    probability, both over its tokens and all layers. f has no gradient, so once the members have added up
    their counts, the share of each is linear in the probabilities of its own rows.

    Args:
        router_logits: [T, experts] of every layer, padding rows last.
        context: of the task.
        config: of the language model.

    Returns:
        A scalar; None where nothing is trained.

    Raises:
        UnsupportedError: the logits have no gradient, so the loss would train nothing.
    """
    coefficient = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)
    if not torch.is_grad_enabled() or not coefficient:
        return None
    if not any(logits.requires_grad for logits in router_logits):
        raise UnsupportedError(
            "the router's auxiliary loss has no gradient under reentrant gradient checkpointing",
            'Set gradient_checkpointing_kwargs={"use_reentrant": False}, or output_router_logits to False.',
        )
    layout, member = context.layout, context.exchange.member
    owner = torch.repeat_interleave(
        torch.tensor([piece.index for piece in layout.pieces(member)], dtype=torch.int64),
        torch.tensor([piece.rows for piece in layout.pieces(member)], dtype=torch.int64),
    ).to(router_logits[0].device)
    experts, chosen = num_experts(config), int(config.num_experts_per_tok)
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    counts = router_logits[0].new_zeros(len(layout.samples), experts, dtype=dtype)
    sums = torch.zeros_like(counts)
    for logits in router_logits:
        probabilities = torch.softmax(logits[: len(owner)], dim=-1)
        picks = torch.topk(probabilities.detach(), chosen, dim=-1).indices
        hits = counts.new_zeros(len(owner), experts).scatter_(1, picks, 1.0)
        counts = counts.index_add(0, owner, hits)
        sums = sums.index_add(0, owner, probabilities.to(dtype))
    tokens = counts.new_tensor([sample.tokens for sample in layout.samples])
    # tokens · E · Σ (count / (layers · tokens)) · (sum / (layers · tokens)), for each sample
    counts = group_sum(counts, context.exchange)
    shares = (counts * sums).sum(dim=1) * experts / (len(router_logits) ** 2 * tokens)
    return coefficient * shares.sum()
