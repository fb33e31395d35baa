"""Whether this torch has a private operator in the form that it is called in here.

Private operators change between versions. What is given by position is compared by name and type, what is
given by keyword by name, and whatever is left must have a default; so a torch that differs is noticed at
import, where another kernel can take over, and not in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def mismatch(
    name: str, positional: Sequence[str], keywords: Sequence[str] = (), returns: Sequence[str] = ()
) -> str:
    """What stands against calling `torch.ops.aten.<name>`; empty where nothing does.

    Args:
        name: of the operator.
        positional: name and type of the arguments given by position; of one named `_`, the type alone.
        keywords: names of those given by keyword.
        returns: types of what it must return, at least.

    >>> mismatch("add", ["self Tensor", "_ Tensor"], ["alpha"], ["Tensor"])
    ''
    >>> mismatch("mm", ["self Tensor"])
    'aten::mm wants mat2 as well'
    """
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return f"there is no aten::{name}"
    found = [
        _differs(getattr(operator, overload)._schema, positional, keywords, returns)
        for overload in operator.overloads()
    ]
    return "" if "" in found else f"aten::{name} {found[0]}"


def _differs(
    schema: torch._C.FunctionSchema,
    positional: Sequence[str],
    keywords: Sequence[str],
    returns: Sequence[str],
) -> str:
    """In words, how a call would not fit."""
    arguments = schema.arguments
    for wanted, argument in zip(positional, arguments, strict=False):
        name, kind = wanted.split()
        # A value goes where it may be absent as well.
        fits = name in ("_", argument.name) and str(argument.type) in (kind, f"Optional[{kind}]")
        if argument.kwarg_only or not fits:
            return f"takes {argument.name} {argument.type}, not {wanted}"
    if len(arguments) < len(positional):
        return f"takes {len(arguments)} arguments, not {len(positional)}"
    rest = arguments[len(positional) :]
    if absent := set(keywords) - {argument.name for argument in rest}:
        return f"takes no {', '.join(sorted(absent))}"
    for argument in rest:
        if argument.name not in keywords and not argument.has_default_value():
            return f"wants {argument.name} as well"
    given = [str(value.type) for value in schema.returns[: len(returns)]]
    return "" if given == list(returns) else f"returns {given}"
