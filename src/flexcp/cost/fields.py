"""Values out of a JSON object, each checked and named where it is wrong; it knows no particular file."""

from __future__ import annotations

import reprlib
from typing import Any

from flexcp.core.errors import InputError

_PLAUSIBLE = 10**15  # bytes, seconds, tokens: whatever it is, more is garbage


class JsonFields:
    """The fields of one file.

    Args:
        raw: the object.
        source: what messages call it.

    Every method raises an InputError that names the field.
    """

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self._raw, self._source = raw, source

    def at(self, name: str) -> Any:
        """The value under a dotted name; positions stand for entries of lists."""
        value: Any = self._raw
        parts = name.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(value, dict | list) or (isinstance(value, list) and not part.isdecimal()):
                raise self.wrong(".".join(parts[:depth]), value, "an object")
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except LookupError:
                raise InputError(
                    f"{self._source}: {name} is missing",
                    "It may have been cut off; run flexcp profile again.",
                ) from None
        return value

    def number(self, name: str, least: float = 0.0, most: float = _PLAUSIBLE) -> float:
        """A number in a range."""
        value = self.at(name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not (good and least <= value <= most):
            raise self.wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def count(self, name: str, least: int) -> int:
        """A whole number."""
        value = self.at(name)
        if type(value) is not int or not least <= value <= _PLAUSIBLE:
            raise self.wrong(name, value, f"a whole number from {least} to {_PLAUSIBLE:g}")
        return value

    def counts(self, name: str, least: int) -> tuple[int, ...]:
        """A list of whole numbers, not empty."""
        count = len(self.items(name))
        if not count:
            raise self.wrong(name, [], "a list that holds something")
        return tuple(self.count(f"{name}.{index}", least) for index in range(count))

    def items(self, name: str) -> list[Any]:
        """A list, perhaps empty."""
        value = self.at(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def text(self, name: str) -> str:
        """A text, not empty."""
        value = self.at(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, value, "a text")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.at(name)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def wrong(self, name: str, value: object, wanted: str) -> InputError:
        """The error that a value is not what it must be."""
        return InputError(f"{self._source}: {name} is {reprlib.repr(value)}", f"It must be {wanted}.")
