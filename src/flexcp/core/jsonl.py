"""Files of one JSON object a line, as runs write them while they run, and checks of what is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flexcp.core.errors import InputError

_Value = TypeVar("_Value")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside of it files are read.

    Args:
        path: what is named where the system does not say which it was.

    Raises:
        InputError: the system refuses one.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or path} cannot be read ({error.strerror})", "Change its permissions."
        ) from None


def read_lines(path: Path, make: Callable[[dict[str, Any]], _Value]) -> Iterator[_Value]:
    """What `make` makes of every object, in the order written.

    A last line that a killed process left unfinished is dropped (see `ends_whole`).

    Raises:
        InputError: another line is damaged; it is named.
    """
    with readable(path), path.open(encoding="utf-8", errors="replace") as file:
        for position, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                value = make(parse_json(line))
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {position}, is damaged ({type(error).__name__}: {error})",
                    "Copy the folder again, or remove the line.",
                ) from None
            yield value


def ends_whole(path: Path) -> bool:
    """Whether the last line of a file is finished; an empty file has none to finish.

    Raises:
        InputError: the system refuses to read it.
    """
    with readable(path), path.open("rb") as file:
        size = file.seek(0, 2)
        if not size:
            return True
        file.seek(size - 1)
        return file.read() == b"\n"


def parse_json(text: str) -> Any:
    """JSON as the standard has it.

    >>> parse_json('[1, NaN]')
    Traceback (most recent call last):
    ValueError: NaN is not a number of JSON
    """
    return json.loads(text, parse_constant=_refuse)


_PLAUSIBLE = 1e15  # seconds, tokens, ranks: whatever it is, more is garbage


def number(value: Any, name: str, least: float = -_PLAUSIBLE) -> float:
    """A number that JSON carried.

    Raises:
        ValueError: it is something else, below `least`, or beyond all reason.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _PLAUSIBLE:
        raise ValueError(f"{name} is {value!r}")
    return value


def whole(value: Any, name: str, least: int = 0) -> int:
    """A whole number that JSON carried.

    Raises:
        ValueError: it is something else, below `least`, or beyond all reason.
    """
    if not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}")
    return int(number(value, name, least))


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
