"""Functions of the user's that the runtime calls: one that raises is named, wherever it was called from."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from flexcp.core.errors import FlexCPError, RunError, summary_of

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def named(name: str, function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """The function, under the name of the argument that it was given as.

    Raises:
        RunError: it raised something that is not one of FlexCP's own errors.
    """

    def call(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        try:
            return function(*args, **kwargs)
        except FlexCPError:
            raise
        except Exception as error:
            raise RunError(
                f"{name} raised {summary_of(error)}", f"Mend the function that was given as {name}."
            ) from error

    return call
