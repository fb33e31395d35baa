"""What every rank is doing, in a small file of its own: what is left to read when a rank has died or stalled.

One file of fixed size a rank, written in place, so that saying something costs microseconds and a rank that
is killed leaves its last word. Nothing waits for it and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_BYTES = 4096
_NAMES_BYTES = 1500  # what the names of samples may take of it
_DOING_CHARS = 500  # a group of many ranks is long to tell


@dataclass(frozen=True, slots=True)
class Status:
    """The last word of a rank.

    Attributes:
        rank, host: who.
        at_s: when, seconds since 1970.
        doing: what, as the end of a sentence that begins with the rank.
        step: index of the step; None before the first.
        samples: names of those of its task.
    """

    rank: int
    host: str
    at_s: float
    doing: str
    step: int | None = None
    samples: tuple[str, ...] = ()

    def __str__(self) -> str:
        step = "before step 0" if self.step is None else f"in step {self.step}"
        samples = f" (samples {', '.join(self.samples)})" if self.samples else ""
        return f"{step}, {self.doing}{samples}"


class _Writer:
    """Of this process; writes nothing until it is opened."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._rank, self._host = 0, socket.gethostname()
        self.folder = Path()
        self.opened_at_s = 0.0  # since 1970
        self.wrote_s: float | None = None  # by the clock of this process, which never jumps

    def open(self, folder: Path, rank: int) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file, self.wrote_s = None, None
        self._rank, self.folder, self.opened_at_s = rank, folder, time.time()
        with contextlib.suppress(OSError):  # a run that cannot leave word still runs
            self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)

    def write(self, doing: str, step: int | None, samples: Sequence[str]) -> None:
        if self._file is None:
            return
        self.wrote_s = time.monotonic()
        if len(doing) > _DOING_CHARS:
            doing = f"{doing[:_DOING_CHARS]} …"
        status = Status(self._rank, self._host, time.time(), doing, step, _shortened(samples))
        text = _bytes_of(status)
        if len(text) > _BYTES:  # names full of what JSON writes longer
            text = _bytes_of(replace(status, samples=()))
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text.ljust(_BYTES), 0)


def _bytes_of(status: Status) -> bytes:
    return json.dumps(asdict(status), ensure_ascii=False).encode(errors="replace")


_writer = _Writer()


def leave_word(folder: Path, rank: int) -> None:
    """From here on, `tell` writes what this process says as `rank`, in a folder that exists."""
    _writer.open(folder, rank)
    tell("starting")


def tell(doing: str, step: int | None = None, samples: Sequence[str] = ()) -> None:
    """What this rank is about to do; says nothing where nobody asked for it."""
    _writer.write(doing, step, samples)


def own_silence() -> tuple[Path, float] | None:
    """Where this process leaves word, and seconds since its last; None where it leaves none."""
    return None if _writer.wrote_s is None else (_writer.folder, time.monotonic() - _writer.wrote_s)


def read_status(folder: Path, rank: int) -> Status | None:
    """The last word of a rank; None where it has left none."""
    try:
        body = json.loads(_path(folder, rank).read_bytes())
        return Status(**{**body, "samples": tuple(body["samples"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def last_words(folder: Path, size: int, *, but: int | None = None, most: int = 8) -> str:
    """What ranks said last, a line each: first who left no word, then who has been silent for longest.

    Args:
        folder: where they leave word. It may hold words of an earlier run, so those that are older than this
            process are marked.
        size: number of ranks.
        but: a rank to leave out.
        most: so many ranks are named for each.
    """
    words = {rank: read_status(folder, rank) for rank in range(size) if rank != but}
    lines = []
    if silent := [str(rank) for rank, status in words.items() if status is None]:
        more = f" and {len(silent) - most} more" if len(silent) > most else ""
        lines.append(f"no word in {folder} of rank {', '.join(silent[:most])}{more}")
    now_s = time.time()
    for status in sorted(filter(None, words.values()), key=lambda status: status.at_s)[:most]:
        ago_s = max(0.0, now_s - status.at_s)  # clocks of two machines differ
        earlier = " (before this rank began)" if status.at_s < _writer.opened_at_s else ""
        lines.append(f"rank {status.rank} on {status.host} was {ago_s:.0f} s ago {status}{earlier}")
    return "\n".join(lines)


def _shortened(samples: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    left = _NAMES_BYTES
    for name in samples:
        left -= len(name.encode(errors="replace")) + 4
        if left < 0:
            return (*kept, f"and {len(samples) - len(kept)} more")
        kept.append(name)
    return tuple(kept)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
