"""The numbers of a transformer that decide how long it takes and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Encoder:
    """A vision transformer with full attention inside an image and a plain feed-forward of two matrices.

    Attributes:
        layers, hidden, intermediate: its own; queries, keys and values are as wide as `hidden`.
        patches_per_token: patches that are merged into one token of the language model.
        window_patches: images are cut into tiles of so many patches, which do not see each other; 0 if not.
        both_ways: tokens of an image attend to each other both ways in the language model, too (Gemma 3).

    >>> Encoder(1, 2, 4, patches_per_token=4, window_patches=6).pairs(16)    # 6 * 6 + 6 * 6 + 4 * 4
    88
    """

    layers: int
    hidden: int
    intermediate: int
    patches_per_token: int
    window_patches: int = 0
    both_ways: bool = False

    @property
    def parameters(self) -> int:
        """Weights of the matrices of all layers."""
        return self.layers * self.hidden * (4 * self.hidden + 2 * self.intermediate)

    def pairs(self, patches: int) -> int:
        """Pairs of patches of one image that attend to each other."""
        if not self.window_patches:
            return patches * patches
        tiles, rest = divmod(patches, self.window_patches)
        return tiles * self.window_patches**2 + rest * rest


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a gated feed-forward.

    Attributes:
        hidden, layers, vocab: widths and counts of the language model.
        heads, kv_heads, head_dim: query heads, key/value heads, width of one head.
        intermediate: width of the gated feed-forward (three matrices of hidden x intermediate).
        tied: input embedding and output head share one matrix.
        extra_parameters: parameters outside the language model (vision encoder, projector).
        encoder: the vision encoder, whose images are causal rows of the language model unless it says
            otherwise; None without one, where spans of a sample attend both ways.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    extra_parameters: int = 0
    encoder: Encoder | None = None

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer (norms and biases are below a thousandth)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All weights."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.extra_parameters


def feed_forward(
    hidden: int,
    layers: int,
    width: int,
    *,
    gated: bool = True,
    experts: int = 0,
    chosen: int = 0,
    expert_width: int = 0,
    shared_width: int = 0,
    dense_layers: int = 0,
) -> tuple[int, int]:
    """What a shape says of a feed-forward, of mixtures of experts too.

    Args:
        hidden: of the model.
        layers: of the model.
        width: of a dense feed-forward.
        gated: it has three matrices; where it has two, two thirds of a width are counted.
        experts: routed experts of a layer; 0 in a dense model.
        chosen: to how many of them a token goes.
        expert_width: of one of them.
        shared_width: of all experts that every token meets beside them.
        dense_layers: layers without experts in a model with them.

    Returns:
        `intermediate`, what a token meets, mean of the layers; and weights of experts that it does not meet.

    >>> feed_forward(8, 2, 30), feed_forward(8, 2, 30, gated=False)
    ((30, 0), (20, 0))
    >>> feed_forward(8, 2, 30, experts=4, chosen=2, expert_width=10, shared_width=6, dense_layers=1)
    (28, 480)
    """
    mixed = layers - dense_layers if experts else 0
    met = (layers - mixed) * width + mixed * (chosen * expert_width + shared_width)
    idle = mixed * (experts - chosen) * (3 if gated else 2) * hidden * expert_width
    return (met // layers if gated else max(1, met * 2 // (3 * layers))), idle


# From the public config.json of each model; extra_parameters is the published total less the language model.
# Encoders: vision_config of Qwen3-VL (patches of 16, merged 2 x 2) and of InternVL3 (InternViT-300M, tiles of
# 448 x 448 in patches of 14, merged 2 x 2; its class token is left out).
MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape(
            "internvl3-8b",
            *(28, 3584, 28, 4, 128, 18944, 151674),
            extra_parameters=330_000_000,
            encoder=Encoder(24, 1024, 4096, patches_per_token=4, window_patches=1024),
        ),
        ModelShape(
            "qwen3-vl-8b",
            *(36, 4096, 32, 8, 128, 12288, 151936),
            extra_parameters=580_000_000,
            encoder=Encoder(27, 1152, 4304, patches_per_token=4),
        ),
        ModelShape(
            "qwen3-vl-2b",
            *(28, 2048, 16, 8, 128, 6144, 151936),
            tied=True,
            extra_parameters=410_000_000,
            encoder=Encoder(24, 1024, 4096, patches_per_token=4),
        ),
    )
}


def model_shape(name: str) -> ModelShape:
    """Look a preset up by name.

    >>> round(model_shape("qwen3-8b").parameters / 1e9, 1)
    8.2

    Raises:
        UnknownNameError: names the nearest preset and all of them.
    """
    try:
        return MODEL_SHAPES[name]
    except KeyError:
        raise UnknownNameError("model", name, MODEL_SHAPES) from None
