"""The numbers of a transformer that decide how long it takes and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass

from flexcp.core.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and a gated feed-forward.

    Attributes:
        hidden, layers, vocab: widths and counts of the language model.
        heads, kv_heads, head_dim: query heads, key/value heads, width of one head.
        intermediate: width of the gated feed-forward (three matrices of hidden x intermediate).
        tied: input embedding and output head share one matrix.
        extra_parameters: parameters outside the language model (vision encoder, projector).
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


# From the public config.json of each model; extra_parameters is the published total less the language model.
MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        ModelShape("internvl3-8b", 28, 3584, 28, 4, 128, 18944, 151674, extra_parameters=330_000_000),
        ModelShape("qwen3-vl-8b", 36, 4096, 32, 8, 128, 12288, 151936, extra_parameters=580_000_000),
        ModelShape(
            "qwen3-vl-2b", 28, 2048, 16, 8, 128, 6144, 151936, tied=True, extra_parameters=410_000_000
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
