"""Which rows of which sample lie on which rank of a group.

A function of values only, kept in `core` because three rooms must agree on it to the row: the planner
(memory), the attention (masks and messages) and the batches (which tokens a rank loads).

A sample shorter than `whole_below_tokens` stays whole on one rank: cutting it would cost ring traffic
and save nothing. Every other sample is cut zigzag: rank i holds one slice from the front half and the
mirrored slice from the back half, so that causal work is the same on every rank::

    rows of one sample, d = 3:   | h0 | h1 | h2 | t2 | t1 | t0 |     rank i holds h_i and t_i

DEVIATION from design note "chunk k is rows floor(kL/2d)..floor((k+1)L/2d)": those chunks can give one
rank two spare rows, so a sample of d·E tokens would break a budget of E tokens by one. Here the share of
each *rank* is rounded first (so it is at most ceil(L/d)) and then halved; slices still differ by at most
one row when nothing stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from flexcp.core.errors import InputError
from flexcp.core.sample import Sample

_WHOLE_BELOW_TOKENS = 512


def default_whole_below_tokens(tokens_per_rank: int) -> int:
    """Samples shorter than this are not worth cutting; at most half of what a rank holds, so that packs fit.

    >>> default_whole_below_tokens(8192), default_whole_below_tokens(600)
    (512, 300)
    """
    return min(_WHOLE_BELOW_TOKENS, tokens_per_rank // 2)


def heads_divide(heads: int, kv_heads: int, degree: int) -> bool:
    """Whether heads can be dealt out to `degree` ranks: each gets as many query heads, with their keys.

    Key/value heads are dealt out too, or each goes to several ranks that hold the query heads of its group.

    >>> [degree for degree in range(1, 65) if heads_divide(32, 8, degree)]
    [1, 2, 4, 8, 16, 32]
    """
    return heads > 0 and heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [start, stop) of the sample at `index` in the pack."""

    index: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows, possibly 0."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)  # equal by identity: a key of caches, once per layer and pass
class Layout:
    """Where every row of a pack lies; `make_layout` gives the same object for the same arguments.

    Attributes:
        samples: the pack, in order.
        degree: d, ranks in the group.
        cut: per member of the group, its pieces of cut samples, ascending by (index, start). These come
            first in the member's local rows, and they are what travels around the ring.
        whole: per member, its whole samples. They follow the cut pieces and never travel.
        window: rows of a sample that a row of text may see, itself the last of them; None for all before it.
    """

    samples: tuple[Sample, ...]
    degree: int
    cut: tuple[tuple[Piece, ...], ...]
    whole: tuple[tuple[Piece, ...], ...]
    window: int | None = None

    def pieces(self, member: int) -> tuple[Piece, ...]:
        """All pieces of one member, in local row order."""
        return self.cut[member] + self.whole[member]

    def cut_rows(self, member: int) -> int:
        """Rows of `member` that travel around the ring."""
        return sum(piece.rows for piece in self.cut[member])

    def rows(self, member: int) -> int:
        """Rows that `member` holds."""
        return sum(piece.rows for piece in self.pieces(member))

    @property
    def max_rows(self) -> int:
        """Rows on the fullest member; what memory must hold."""
        return max(self.rows(member) for member in range(self.degree))


@lru_cache(maxsize=4096)
def make_layout(samples: tuple[Sample, ...], degree: int, whole_below_tokens: int) -> Layout:
    """Place every row of a pack on one of `degree` ranks.

    Rows per rank are level: the fullest rank holds at most max(ceil(total / d), its whole samples).

    Complexity: O(samples · degree). Pure and cached: every rank of a group asks for the same layout once
    per layer and direction.

    >>> layout = make_layout((Sample(0, 7), Sample(1, 2)), degree=2, whole_below_tokens=3)
    >>> layout.pieces(0)
    (Piece(index=0, start=0, stop=1), Piece(index=0, start=5, stop=7), Piece(index=1, start=0, stop=2))
    >>> [layout.rows(member) for member in (0, 1)]
    [5, 4]
    """
    whole, loads = _place_whole(samples, degree, whole_below_tokens)
    placed = {piece.index for pieces in whole for piece in pieces}
    cut_indices = [i for i in range(len(samples)) if i not in placed]
    quotas = _level(loads, sum(samples[i].tokens for i in cut_indices))
    cut: list[list[Piece]] = [[] for _ in range(degree)]
    for index in cut_indices:
        shares = _split(samples[index].tokens, quotas)
        quotas = [quota - share for quota, share in zip(quotas, shares, strict=True)]
        for member, pieces in enumerate(_zigzag(index, shares)):
            cut[member].extend(pieces)
    return Layout(
        samples, degree, tuple(tuple(pieces) for pieces in cut), tuple(tuple(pieces) for pieces in whole)
    )


@lru_cache(maxsize=4096)
def windowed(layout: Layout, window: int) -> Layout:
    """The same rows, each of which sees no further back than `window` rows, its own included; cached.

    Rows of a full-attention span see to the end of it, and no further back than others.

    Raises:
        InputError: the window holds no row.
    """
    if window < 1:
        raise InputError(f"the attention window is {window}", "A row sees at least itself: 1 or more.")
    return replace(layout, window=window)


def _place_whole(
    samples: Sequence[Sample], degree: int, whole_below_tokens: int
) -> tuple[list[list[Piece]], list[int]]:
    """Longest first onto the member with the fewest rows; at degree 1 nothing is ever cut."""
    whole: list[list[Piece]] = [[] for _ in range(degree)]
    loads = [0] * degree
    short = [i for i, s in enumerate(samples) if degree == 1 or s.tokens < whole_below_tokens]
    for index in sorted(short, key=lambda i: (-samples[i].tokens, i)):
        member = loads.index(min(loads))
        whole[member].append(Piece(index, 0, samples[index].tokens))
        loads[member] += samples[index].tokens
    for pieces in whole:
        pieces.sort(key=lambda piece: piece.index)
    return whole, loads


def _level(loads: Sequence[int], cut_tokens: int) -> list[int]:
    """Rows each member takes of the cut samples, so that totals come out level (water filling)."""
    order = sorted(range(len(loads)), key=lambda member: (loads[member], member))
    filled = 0
    for count in range(1, len(order) + 1):
        filled += loads[order[count - 1]]
        following = loads[order[count]] if count < len(order) else None
        level, spare = divmod(filled + cut_tokens, count)
        if following is None or level + (spare > 0) <= following:
            break
    quotas = [0] * len(loads)
    for place, member in enumerate(sorted(order[:count])):
        quotas[member] = level + (place < spare) - loads[member]
    return quotas


def _split(tokens: int, quotas: Sequence[int]) -> list[int]:
    """Share one sample in proportion to what each member may still take; exact, never above a quota."""
    total = sum(quotas)
    shares, seen, given = [], 0, 0
    for quota in quotas:
        seen += quota
        upto = tokens * seen // total
        shares.append(upto - given)
        given = upto
    return shares


def _zigzag(index: int, shares: Sequence[int]) -> list[tuple[Piece, ...]]:
    """Front slice and mirrored back slice of every member; adjacent slices become one piece."""
    heads = [share // 2 for share in shares]
    start, stop = 0, sum(shares)
    members: list[tuple[Piece, ...]] = []
    for share, head in zip(shares, heads, strict=True):
        tail = share - head
        front, back = Piece(index, start, start + head), Piece(index, stop - tail, stop)
        start, stop = front.stop, back.start
        members.append((front, back) if front.stop < back.start else (Piece(index, front.start, back.stop),))
    return [tuple(piece for piece in pieces if piece.rows) for pieces in members]
