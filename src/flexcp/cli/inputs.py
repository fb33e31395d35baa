"""Length files of every kind as one numbered list, and the global batches drawn from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexcp.cli.histograms import DRAWS, is_histogram, read_histogram
from flexcp.core.cluster import Cluster
from flexcp.core.errors import SampleTooLongError
from flexcp.core.lengths import Lengths, read_lengths, read_samples
from flexcp.core.model_shape import ModelShape
from flexcp.core.sample import Sample
from flexcp.cost import Hardware
from flexcp.cost.encoder import encoded
from flexcp.runtime.order import batch_indices

Batch = tuple[Sample, ...]
Spans = tuple[tuple[int, int], ...]

_MANY = 10_000_000


@dataclass(frozen=True, slots=True)
class Inputs:
    """All lengths, numbered through the files; spans only where there are some; what the user should know."""

    lengths: Lengths
    spans: dict[int, Spans]
    notices: tuple[str, ...]
    encoder_pairs: dict[int, int] = field(default_factory=dict)

    def sample(self, index: int) -> Sample:
        """One of them, with its number as id."""
        spans, pairs = self.spans.get(index, ()), self.encoder_pairs.get(index, 0)
        return Sample(index, int(self.lengths[index]), spans, pairs)

    def encoded(self, shape: ModelShape, hardware: Hardware) -> Inputs:
        """As a model with a vision encoder sees them; for other models these."""
        if shape.encoder is None or not self.spans:
            return self
        pairs = {index: encoded(self.sample(index), shape, hardware).encoder_pairs for index in self.spans}
        images = sum(map(len, self.spans.values()))
        notice = f"{images:,} images in {len(pairs):,} samples pass the vision encoder of {shape.name}."
        return Inputs(self.lengths, {}, (*self.notices, notice), pairs)


def read_inputs(paths: Sequence[Path], column: str | None) -> Inputs:
    """Read all files.

    Raises:
        LengthsError: names the file and the line or entry that is not a length.
    """
    parts: list[Lengths] = []
    spans: dict[int, Spans] = {}
    notices: list[str] = []
    total = 0
    for path in paths:
        lengths, some = _read(path, column, notices)
        spans.update((total + index, pairs) for index, pairs in some.items())
        parts.append(lengths)
        total += len(lengths)
    if total > _MANY:
        notices.append(f"{total:,} lengths: batches are a random sample of them.")
    return Inputs(np.concatenate(parts), spans, tuple(notices))


def _read(path: Path, column: str | None, notices: list[str]) -> tuple[Lengths, dict[int, Spans]]:
    """Lengths of one file, and spans by position."""
    if is_histogram(path):
        notices.append(f"{path.name} holds probabilities: {DRAWS:,} lengths are drawn from them.")
        samples = read_histogram(path)
    elif _mentions_spans(path):
        samples = read_samples(path, column)
    else:
        return read_lengths(path, column), {}
    lengths = np.array([sample.tokens for sample in samples], dtype=np.int64)
    return lengths, {sample.id: sample.spans for sample in samples if sample.spans}


def _mentions_spans(path: Path) -> bool:
    """Samples with spans are read one by one; everything else as an array."""
    if path.suffix in (".idx", ".csv", ".tsv", ".psv") or not path.is_file():
        return False
    return b'"spans"' in path.read_bytes()


def refuse_too_long(inputs: Inputs, cluster: Cluster) -> None:
    """Asked of all samples, drawn or not: training would meet every one of them.

    Raises:
        SampleTooLongError: with the number of ranks on which it fits.
    """
    longest = int(inputs.lengths.argmax())
    tokens = int(inputs.lengths[longest])
    if tokens > cluster.capacity_tokens:
        raise SampleTooLongError(f"sample {longest}", tokens, cluster.tokens_per_rank, cluster.ranks)


def global_batches(inputs: Inputs, size: int, steps: int, seed: int) -> tuple[Batch, ...]:
    """Draw without replacement; fewer or smaller batches where the samples run out.

    >>> inputs = Inputs(np.arange(10, 15), {}, ())
    >>> [len(batch) for batch in global_batches(inputs, size=2, steps=9, seed=0)]
    [2, 2, 1]
    """
    count = len(inputs.lengths)
    chosen = random.Random(seed).sample(range(count), min(count, size * steps))  # noqa: S311 (no secret)
    drawn = [inputs.sample(index) for index in chosen]
    return tuple(tuple(drawn[start : start + size]) for start in range(0, len(drawn), size))


@dataclass(frozen=True, slots=True)
class EpochBatches(Sequence[Batch]):
    """The global batches that a training run would draw, epoch after epoch; each made when asked for.

    >>> batches = EpochBatches(Inputs(np.arange(10, 15), {}, ()), size=3, steps=4, seed=0)
    >>> [len(batch) for batch in batches], sorted(s.tokens for s in (batches[0] + batches[1])[:5])
    ([3, 3, 3, 3], [10, 11, 12, 13, 14])
    """

    inputs: Inputs
    size: int
    steps: int
    seed: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: Any) -> Any:
        if not 0 <= step < self.steps:
            raise IndexError(step)
        indices = batch_indices(len(self.inputs.lengths), self.size, self.seed, step)
        return tuple(self.inputs.sample(index) for index in indices.tolist())
