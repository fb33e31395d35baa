"""Files of one JSON object a line, as runs write them while they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from flexcp.core.errors import InputError

_Value = TypeVar("_Value")


def read_lines(path: Path, make: Callable[[dict[str, Any]], _Value]) -> Iterator[_Value]:
    """What `make` makes of every object, in the order written.

    A last line that a killed process left unfinished is dropped (see `ends_whole`).

    Raises:
        InputError: another line is damaged; it is named.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                value = make(parse_json(line))
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise InputError(
                    f"{path}, line {number}, is damaged ({type(error).__name__}: {error})",
                    "Copy the folder again, or remove the line.",
                ) from None
            yield value


def ends_whole(path: Path) -> bool:
    """Whether the last line of a file is finished; an empty file has none to finish."""
    with path.open("rb") as file:
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


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
