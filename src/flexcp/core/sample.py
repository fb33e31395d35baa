"""One training sequence, as the planner sees it: how long it is and who attends to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

from flexcp.core.errors import LengthsError

IGNORE_INDEX = -100  # the field's mark, among labels, for a token that is not a target


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence of `tokens` rows under a causal mask, except for its full-attention spans.

    Attributes:
        id: index of the sample in its data set. A batch that spans epochs may hold a sample twice.
        tokens: length L, at least 1.
        spans: half-open row ranges, ascending and disjoint, whose rows attend to each other both
            ways (image tokens inside a causal text). Every row still attends to all earlier rows.
        encoder_pairs: work of a vision encoder for its images, as pairs that take as long (`cost.encoder`).

    >>> Sample(0, 4).attended_pairs
    10
    >>> Sample(0, 4, spans=((1, 3),)).attended_pairs   # row 1 also sees row 2
    11
    """

    id: int
    tokens: int
    spans: tuple[tuple[int, int], ...] = ()
    encoder_pairs: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise LengthsError(f"sample {self.id} has {self.tokens} tokens", "Lengths start at 1.")
        end = 0
        for a, b in self.spans:
            if not end <= a < b <= self.tokens:
                raise LengthsError(
                    f"sample {self.id} has the span [{a}, {b}) in {self.tokens} tokens",
                    "Spans are half-open, ascending, disjoint and inside the sample.",
                )
            end = b

    @property
    def causal_pairs(self) -> int:
        """Query-key pairs of the causal mask alone, L(L+1)/2."""
        return self.tokens * (self.tokens + 1) // 2

    @property
    def attended_pairs(self) -> int:
        """Query-key pairs that are really computed; attention work is proportional to it."""
        return self.causal_pairs + sum((b - a) * (b - a - 1) // 2 for a, b in self.spans)

    @property
    def work_pairs(self) -> int:
        """What attention and the vision encoder take together, in attended pairs."""
        return self.attended_pairs + self.encoder_pairs

    @property
    def eta(self) -> float:
        """The paper's mask factor η: the share that full spans add to the causal pairs."""
        return self.attended_pairs / self.causal_pairs - 1.0


def samples_from_lengths(lengths: Iterable[object]) -> tuple[Sample, ...]:
    """Number causal samples from 0 in the order given.

    Raises:
        LengthsError: an entry is not a positive whole number; its position is named.
    """
    samples = []
    for position, length in enumerate(lengths):
        samples.append(Sample(position, _as_length(length, position)))
    if not samples:
        raise LengthsError("the list of lengths is empty", "Give at least one sample.")
    return tuple(samples)


def _as_length(value: object, position: int) -> int:
    whole = 0
    if isinstance(value, bool):
        pass  # an int to Python, never a length to a person
    elif isinstance(value, Integral) or (isinstance(value, float) and value.is_integer()):
        whole = int(value)
    if whole < 1:
        raise LengthsError(
            f"entry {position} of the lengths is {value!r}",
            "Lengths are whole numbers of tokens, at least 1.",
        )
    return whole
