"""What the vision encoder of a model adds to a sample, in the pairs that the time formula knows.

The encoder runs once for every image, on patches before they are merged into tokens; its work is shared by
the ranks of a group like all other. It is counted in seconds and expressed as attended pairs of the language
model that take as long, so planner, bounds and simulator need no term more. The one thing that is not exact:
like attention it then hides ring traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexcp.core.images import RowsOfImages
from flexcp.core.model_shape import ModelShape
from flexcp.core.sample import Sample
from flexcp.cost.flops import ATTENTION_BACKWARD, MATMUL_BACKWARD, flops_per_pair
from flexcp.cost.presets import Hardware


def encoded(sample: Sample, shape: ModelShape, hardware: Hardware, *, checkpointing: bool = True) -> Sample:
    """A sample as a model with a vision encoder sees it: its spans are images.

    In most such models they are causal among the text. Models without an encoder attend both ways inside a
    span, and get the sample back.

    Args:
        sample: spans are the tokens of its images.
        shape: the model.
        hardware: what runs it; its shares of the peak turn operations into pairs.
        checkpointing: layers of the encoder are recomputed too.
    """
    if shape.encoder is None or not sample.spans:
        return sample
    images = [(stop - start) * shape.encoder.patches_per_token for start, stop in sample.spans]
    pairs = encoder_pairs(images, shape, hardware, checkpointing=checkpointing)
    spans = sample.spans if shape.encoder.both_ways else ()
    return Sample(sample.id, sample.tokens, spans, encoder_pairs=pairs)


def image_sample(
    index: int,
    rows: RowsOfImages,
    shape: ModelShape,
    hardware: Hardware,
    *,
    checkpointing: bool = True,
) -> Sample:
    """What a data set's `sample(index)` returns: length, mask and encoder work, all known from image sizes.

    Args:
        index: of the sample.
        rows: where its images lie, from `core.images.lay_out`.
        shape: the model, with its encoder.
        hardware: what runs it.
        checkpointing: layers are recomputed.

    >>> from flexcp.core.images import SmartResize, lay_out
    >>> from flexcp.core.model_shape import model_shape
    >>> from flexcp.cost.presets import hardware
    >>> rows = lay_out([20, SmartResize().image(1024, 768), 100])
    >>> image_sample(7, rows, model_shape("qwen3-vl-8b"), hardware("h100"))
    Sample(id=7, tokens=888, spans=(), encoder_pairs=4599421)
    """
    pairs = encoder_pairs(rows.patches, shape, hardware, checkpointing=checkpointing)
    both_ways = shape.encoder is None or shape.encoder.both_ways
    return Sample(index, rows.tokens, rows.spans if both_ways else (), pairs)


def encoder_pairs(
    images: Sequence[int], shape: ModelShape, hardware: Hardware, *, checkpointing: bool = True
) -> int:
    """Attended pairs of the language model that take as long as the encoder for some images.

    A model without an encoder adds nothing.

    Args:
        images: patches of each, before merging.
        shape: the model.
        hardware: what runs it; its shares of the peak turn operations into pairs.
        checkpointing: layers of the encoder are recomputed too.
    """
    if shape.encoder is None:
        return 0
    matrices, attention = encoder_flops(images, shape, checkpointing=checkpointing)
    # Per pair of the language model at its share of the peak; the peak itself cancels.
    pair = flops_per_pair(shape, checkpointing=checkpointing) / hardware.attention_efficiency
    return round((matrices / hardware.matmul_efficiency + attention / hardware.attention_efficiency) / pair)


def encoder_flops(
    images: Sequence[int], shape: ModelShape, *, checkpointing: bool = True
) -> tuple[float, float]:
    """Operations of the encoder for some images, forward and backward: matrices, and full attention.

    What `extra_parameters` hold beside the layers projects merged patches, once a token of the image.

    >>> from flexcp.core.model_shape import Encoder
    >>> eye = Encoder(layers=1, hidden=2, intermediate=4, patches_per_token=4)
    >>> tiny = ModelShape("tiny", 1, 2, 1, 1, 2, 4, 8, extra_parameters=48, encoder=eye)
    >>> encoder_flops([8], tiny, checkpointing=False)     # 6 * (8 * 32 + 2 * 16), 4 * 2 * 64 * 3.5
    (1728.0, 1792.0)
    """
    encoder = shape.encoder
    if encoder is None:
        return 0.0, 0.0
    patches = sum(images)
    layers = 2.0 * encoder.parameters * patches
    projector = 2.0 * (shape.extra_parameters - encoder.parameters) * patches / encoder.patches_per_token
    attention = 4.0 * encoder.layers * encoder.hidden * sum(map(encoder.pairs, images))
    return (
        layers * (1 + MATMUL_BACKWARD + checkpointing) + projector * (1 + MATMUL_BACKWARD),
        attention * (1 + ATTENTION_BACKWARD + checkpointing),
    )
