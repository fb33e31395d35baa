"""The ranks of one start find each other in a store that may hold the words of earlier starts.

torchrun keeps the store of its agents when it starts ranks again, so addresses of ranks that are gone lie
where those of the new ones are looked for. Its agents need not agree on how often they have started, so no
number that a rank is given tells one start from another.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

from flexcp.core.errors import RankFailedError

_PERIOD_S = 0.05
_START = "flexcp/start"


def store_of_this_start(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """A part of the store that no earlier start has written to; all ranks of this start get the same.

    Every rank leaves a word that nobody can have left before. Rank 0 answers with the words it finds, and
    again when one of them changes, until every rank has found its own among them.

    Raises:
        RankFailedError: the others did not come within `timeout_s` seconds.
    """
    end_s = time.monotonic() + timeout_s
    start = _call(store, size, end_s) if rank == 0 else _answer(store, rank, end_s)
    return PrefixStore(start, store)


def _call(store: Store, size: int, end_s: float) -> str:
    start = f"flexcp/{uuid.uuid4().hex}"
    told: list[str] = []
    while store.add(f"{start}/heard", 0) < size - 1:
        words = [_read(store, _word_of(rank)) for rank in range(1, size)]
        if words != told and all(words):
            told = words
            store.set(_START, json.dumps([start, words]))
        _pause(end_s)
    return start


def _answer(store: Store, rank: int, end_s: float) -> str:
    mine = uuid.uuid4().hex
    store.set(_word_of(rank), mine)
    while True:
        start, words = json.loads(_read(store, _START) or '["", []]')
        if mine in words:
            store.add(f"{start}/heard", 1)
            return str(start)
        _pause(end_s)


def _word_of(rank: int) -> str:
    return f"flexcp/word/{rank}"


def _read(store: Store, key: str) -> str:
    """Empty where nothing was written yet: a plain `get` would wait."""
    return store.get(key).decode() if store.check([key]) else ""


def _pause(end_s: float) -> None:
    if time.monotonic() > end_s:
        raise RankFailedError(
            "not all ranks came to the start of the run",
            "Look at what became of the others; a longer run.timeout_s waits longer.",
        )
    time.sleep(_PERIOD_S)
