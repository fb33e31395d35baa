"""Bytes one rank needs, M(s): model states by sharding, activations by token, the loss by chunk.

A step is as large as its largest moment, and each moment is a constant and a share for every token, so the
answer E as tokens, `tokens_per_rank`, is exact; d_min = ceil(tokens / E) follows (`core.cluster.Cluster`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexcp.core.errors import InfeasibleError, UnknownNameError
from flexcp.core.model_shape import Encoder, ModelShape
from flexcp.cost.presets import Hardware

Sharding = Literal["ddp", "zero1", "zero2", "zero3"]
SHARDINGS: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3")

# Share of the memory that is left to the allocator, the runtime and communication.
MARGIN = 0.1
# The loss widens logits to fp32 in chunks of so many tokens (`runtime.loss`).
LOSS_CHUNK_TOKENS = 1024
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes on one rank at one point of a step: `fixed_bytes + bytes_per_token * tokens`."""

    name: str
    fixed_bytes: float
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """M(s) of one model on one rank.

    Attributes:
        states_bytes: weights, gradients and optimizer, see `model_state_bytes`.
        moments: those that can be the peak of a step; `fixed_bytes` holds the states.
    """

    states_bytes: float
    moments: tuple[Moment, ...]

    @property
    def bytes_per_token(self) -> float:
        """By how much the peak of large packs grows with a token of this rank."""
        return max(moment.bytes_per_token for moment in self.moments)

    def peak(self, tokens: int) -> Moment:
        """The largest moment of a step whose packs place up to `tokens` tokens here."""
        return max(self.moments, key=lambda moment: moment.fixed_bytes + moment.bytes_per_token * tokens)

    def peak_bytes(self, tokens: int) -> float:
        """Bytes of the largest moment.

        >>> Memory(0.0, (Moment("a", 10.0, 1.0), Moment("b", 4.0, 2.0))).peak_bytes(8)
        20.0
        """
        peak = self.peak(tokens)
        return peak.fixed_bytes + peak.bytes_per_token * tokens

    def tokens(self, budget_bytes: float) -> int:
        """Most tokens whose peak stays within a budget; below 1 where none does."""
        room = [
            (budget_bytes - moment.fixed_bytes) // moment.bytes_per_token
            for moment in self.moments
            if moment.bytes_per_token
        ]
        fits = all(moment.fixed_bytes <= budget_bytes for moment in self.moments)
        return int(min(room)) if fits else 0


def memory_model(
    shape: ModelShape,
    ranks: int,
    *,
    element_bytes: int,
    sharding: Sharding = "zero1",
    checkpointing: bool = True,
    token_scale: float = 1.0,
) -> Memory:
    """M(s) counted from the shape of a model.

    Args:
        shape: the model; one rank holds all of it, apart from what is sharded.
        ranks: N, over which states are sharded.
        element_bytes: of a weight or activation in the training precision.
        sharding: see `model_state_bytes`.
        checkpointing: layers keep their input alone and are recomputed, one at a time.
        token_scale: measured over counted bytes of a token, where a profile knows (`Hardware.token_scale`).

    Moments: the `loss`, when all activations, the logits and their gradient are held; a `layer` in its
    backward pass, when the logits still are; the `optimizer`, which takes a square root of every gradient.

    Raises:
        UnknownNameError: no such sharding.
    """
    states = model_state_bytes(shape, sharding, ranks, element_bytes)
    head_gradient = float(element_bytes * shape.vocab * shape.hidden)  # before it is added to the sum
    chunk = 2.0 * LOSS_CHUNK_TOKENS * shape.vocab * _FLOAT_BYTES  # widened, and its softmax
    logits = float(element_bytes * shape.vocab)
    kept, working = _activation_bytes(shape, element_bytes, checkpointing=checkpointing)
    last = _norm_bytes(shape.hidden, element_bytes) + element_bytes * shape.hidden
    updated = shape.parameters / (1 if sharding == "ddp" else ranks)
    return Memory(
        states,
        (
            Moment("loss", states + max(chunk, head_gradient), token_scale * (kept + last + 2 * logits)),
            Moment("layer", states + head_gradient, token_scale * (kept + working + logits)),
            Moment("optimizer", states + _FLOAT_BYTES * updated),
        ),
    )


def model_state_bytes(shape: ModelShape, sharding: Sharding, ranks: int, element_bytes: int) -> float:
    """Bytes of weights, gradients and optimizer on one rank, at their peak within a step.

    Adam keeps two fp32 moments. Gradients add up over the tasks of a step in fp32. Where weights are
    narrower than fp32 or sharded, their fp32 original is stored besides those that compute.

    - `ddp`: everything on every rank.
    - `zero1`: what FSDP2 is when it gathers once per step: full weights and gradients, the rest / ranks.
    - `zero2`: full weights, the rest / ranks, and the gradients of one layer on their way.
    - `zero3`: everything / ranks, and two layers gathered (one computing, one prefetched).

    >>> tiny = ModelShape("tiny", 1, 2, heads=1, kv_heads=1, head_dim=2, intermediate=4, vocab=8)
    >>> tiny.parameters, [model_state_bytes(tiny, s, 4, 2) for s in SHARDINGS]    # 72 * 18, 72 * 9, ...
    (72, [1296.0, 648.0, 592.0, 768.0])

    Raises:
        UnknownNameError: no such sharding.
    """
    adam, original = 2 * _FLOAT_BYTES, _FLOAT_BYTES
    if sharding == "ddp":
        copy = element_bytes if element_bytes < _FLOAT_BYTES else 0
        return float(shape.parameters * (copy + _FLOAT_BYTES + adam + original))
    stored = adam + original
    if sharding == "zero1":
        return shape.parameters * (element_bytes + _FLOAT_BYTES + stored / ranks)
    if sharding == "zero2":
        moving = _FLOAT_BYTES * shape.layer_parameters
        return shape.parameters * (element_bytes + (_FLOAT_BYTES + stored) / ranks) + moving
    if sharding == "zero3":
        gathered = 2 * shape.layer_parameters * (element_bytes + _FLOAT_BYTES)
        return shape.parameters * (_FLOAT_BYTES + stored) / ranks + gathered
    raise UnknownNameError("sharding", sharding, SHARDINGS)


def _activation_bytes(shape: ModelShape, element_bytes: int, *, checkpointing: bool) -> tuple[float, float]:
    """Bytes a token that all layers keep until the backward pass, and what one layer adds in its own.

    What torch saves for a layer of transformers' Qwen3: inputs of norms, widened to fp32, and what was
    normalised (also queries and keys; other models leave theirs alone); inputs of matrices; q, k, v and
    output of flash attention, which keeps no scores; gate, its activation, up, and the product.
    In the backward pass of the feed-forward two gradients of its width are held, in that of attention the
    fp32 gradients of q, k, v and two blocks of keys and values of the ring, with theirs. The block that
    comes last has given back what its layer kept for the other.
    """
    narrow, hidden = element_bytes, shape.hidden
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    block = _norm_bytes(hidden, narrow) + narrow * hidden
    attention = block + _norm_bytes(query + key_value, narrow) + 2 * narrow * (query + key_value)
    feed_forward = block + 4 * narrow * shape.intermediate
    ring = 2 * key_value * (2 * narrow + 4 * _FLOAT_BYTES)
    attention_gradients = narrow * (hidden + query) + (_FLOAT_BYTES + narrow) * query + ring
    feed_forward_gradients = narrow * (hidden + 2 * shape.intermediate)
    gradients = max(feed_forward_gradients, attention_gradients - feed_forward)
    layer = attention + feed_forward
    images = _encoder_bytes(shape.encoder, narrow, checkpointing=checkpointing)
    if checkpointing:
        return float(shape.layers * narrow * hidden + images), float(layer + gradients)
    return float(shape.layers * layer + images), float(gradients)


def _encoder_bytes(encoder: Encoder | None, element_bytes: int, *, checkpointing: bool) -> int:
    """What a vision encoder keeps of a token, as if every token were an image's: some samples are."""
    if encoder is None:
        return 0
    patch = element_bytes * encoder.hidden
    if not checkpointing:
        norms = 2 * (_norm_bytes(encoder.hidden, element_bytes) + element_bytes * encoder.hidden)
        patch = norms + element_bytes * (4 * encoder.hidden + 2 * encoder.intermediate)
    return encoder.patches_per_token * encoder.layers * patch


def _norm_bytes(width: int, element_bytes: int) -> int:
    """What a norm keeps of a token: its input in fp32, and the input normalised."""
    return (_FLOAT_BYTES + element_bytes) * width


def tokens_per_rank(
    shape: ModelShape,
    hardware: Hardware,
    ranks: int,
    *,
    sharding: Sharding = "zero1",
    checkpointing: bool = True,
    margin: float = MARGIN,
) -> int:
    """E as tokens: how many one rank may hold at a time.

    Args:
        shape: the model; one rank holds all of it, apart from what is sharded.
        hardware: what one rank is; a calibration brings what it measured of memory.
        ranks: N, over which states are sharded.
        sharding: see `model_state_bytes`.
        checkpointing: see `memory_model`.
        margin: share of the device memory left to the allocator, the runtime and communication.

    Raises:
        InfeasibleError: nothing is left for tokens; the numbers are named.
        UnknownNameError: no such sharding.
    """
    memory = memory_model(
        shape,
        ranks,
        element_bytes=hardware.element_bytes,
        sharding=sharding,
        checkpointing=checkpointing,
        token_scale=hardware.token_scale,
    )
    budget = hardware.memory_bytes * (1 - margin)
    tokens = memory.tokens(budget)
    if tokens < 1:
        peak = memory.peak(1)
        raise InfeasibleError(
            f"{shape.name} leaves no memory for tokens on {hardware.name}: {budget / 1e9:.1f} GB usable, "
            f"{memory.states_bytes / 1e9:.1f} GB model states ({sharding}, {ranks} ranks), "
            f"{(peak.fixed_bytes - memory.states_bytes) / 1e9:.1f} GB for the {peak.name}",
            "Shard more (zero1 to zero3), use more ranks, tensor or pipeline parallelism, or larger devices.",
        )
    return tokens
