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
from dataclasses import asdict, dataclass
from pathlib import Path

_BYTES = 4096
_NAMES_CHARS = 1500  # what the names of samples may take of it


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
        self.at_s: float | None = None

    def open(self, folder: Path, rank: int) -> None:
        self._rank, self.folder = rank, folder
        with contextlib.suppress(OSError):  # a run that cannot leave word still runs
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)

    def write(self, doing: str, step: int | None, samples: Sequence[str]) -> None:
        if self._file is None:
            return
        self.at_s = time.time()
        status = Status(self._rank, self._host, self.at_s, doing, step, _shortened(samples))
        text = json.dumps(asdict(status), ensure_ascii=False).encode(errors="replace")
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text[:_BYTES].ljust(_BYTES), 0)


_writer = _Writer()


def leave_word(folder: Path, rank: int) -> None:
    """From here on, `tell` writes what this process says as `rank`, in `folder`."""
    _writer.open(folder, rank)
    tell("starting")


def tell(doing: str, step: int | None = None, samples: Sequence[str] = ()) -> None:
    """What this rank is about to do; says nothing where nobody asked for it."""
    _writer.write(doing, step, samples)


def own_silence() -> tuple[Path, float] | None:
    """Where this process leaves word, and seconds since its last; None where it leaves none."""
    return None if _writer.at_s is None else (_writer.folder, time.time() - _writer.at_s)


def read_status(folder: Path, rank: int) -> Status | None:
    """The last word of a rank; None where it has left none."""
    try:
        body = json.loads(_path(folder, rank).read_bytes())
        return Status(**{**body, "samples": tuple(body["samples"])})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def last_words(folder: Path, size: int, *, but: int | None = None, most: int = 8) -> str:
    """What all ranks (but one) said last, a line each, the one that has been silent longest first."""
    known = [status for rank in range(size) if rank != but and (status := read_status(folder, rank))]
    now_s = time.time()
    return "\n".join(
        f"rank {status.rank} on {status.host} was {now_s - status.at_s:.0f} s ago {status}"
        for status in sorted(known, key=lambda status: status.at_s)[:most]
    )


def _shortened(samples: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    left = _NAMES_CHARS
    for name in samples:
        left -= len(name.encode(errors="replace")) + 4
        if left < 0:
            return (*kept, f"and {len(samples) - len(kept)} more")
        kept.append(name)
    return tuple(kept)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
