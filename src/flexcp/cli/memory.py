"""How many tokens a rank may hold, as the command line is told: outright, or by memory and sharding."""

from __future__ import annotations

import re
import reprlib
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.core.model_shape import ModelShape
from flexcp.cost import Hardware, Sharding, memory_model, tokens_per_rank
from flexcp.cost.memory import MARGIN, SHARDINGS

PANEL = "Memory of a rank"

_UNITS = {"B": 1} | {
    prefix + binary: base**power
    for power, prefix in enumerate(("K", "M", "G", "T"), 1)
    for binary, base in (("iB", 1024), ("B", 1000))
}
_MOST_BYTES = 1e15

TokensPerRank = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-rank",
        help="Tokens one rank may hold at a time.",
        show_default="from memory",
        rich_help_panel=PANEL,
    ),
]
MemorySize = Annotated[
    str | None,
    typer.Option(
        help=f"Memory of one rank, such as 64GiB; {MARGIN:.0%} of it stay free.",
        show_default="that of the hardware",
        rich_help_panel=PANEL,
    ),
]
ShardingName = Annotated[
    str | None,
    typer.Option(
        help=f"Of weights, gradients, optimizer: {', '.join(SHARDINGS)}.",
        show_default="zero1",
        rich_help_panel=PANEL,
    ),
]


@dataclass(frozen=True, slots=True)
class Holding:
    """The options above; None where one was not given."""

    tokens: int | None
    memory: str | None = None
    sharding: str | None = None

    def tokens_per_rank(
        self, shape: ModelShape, hardware: Hardware, ranks: int, *, checkpointing: bool
    ) -> tuple[int, list[str]]:
        """E as tokens, and how it came about where it was derived.

        Raises:
            ConfigError: an option that is wrong, or given beside --tokens-per-rank.
            UnknownNameError: no such sharding.
            InfeasibleError: the memory holds no token.
        """
        if self.tokens is not None:
            self._refuse_beside_tokens()
            return self.tokens, []
        sharding = _sharding("zero1" if self.sharding is None else self.sharding)
        if self.memory is not None:
            hardware = replace(hardware, memory_bytes=parse_bytes(self.memory, "--memory"))
        tokens = tokens_per_rank(shape, hardware, ranks, sharding=sharding, checkpointing=checkpointing)
        model = memory_model(
            shape,
            ranks,
            element_bytes=hardware.element_bytes,
            sharding=sharding,
            checkpointing=checkpointing,
            token_scale=hardware.token_scale,
        )
        note = (
            f"{tokens:,} tokens a rank from {hardware.memory_bytes / 1e9:.1f} GB: "
            f"{model.states_bytes / 1e9:.1f} GB weights, gradients and optimizer ({sharding}), "
            f"{model.peak_bytes(tokens) / 1e9:.1f} GB at the peak, {'with' if checkpointing else 'without'} "
            "activation checkpointing."
        )
        return tokens, [note]

    def _refuse_beside_tokens(self) -> None:
        for name in ("memory", "sharding"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"--tokens-per-rank and --{name} are both given",
                    "Leave one out: tokens per rank follow from memory and sharding.",
                )


def parse_bytes(text: str, option: str) -> int:
    """A size with its unit.

    >>> parse_bytes("64GiB", "--memory"), parse_bytes("1.5 MB", "--memory")
    (68719476736, 1500000)

    Raises:
        ConfigError: no number, no unit, less than a byte, or more than any machine has.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = _UNITS.get(found[2]) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if not 1 <= size <= _MOST_BYTES:
        meant = next((name for name in _UNITS if found and name.lower() == found[2].lower()), None)
        raise ConfigError(
            f"{option} {reprlib.repr(text)} is not a size",
            f"The unit is written {meant}."
            if meant and not unit
            else "A number and B, KB, MB, GB, TB, or KiB, MiB, GiB, TiB: 64GiB.",
        )
    return int(size)


def _sharding(name: str) -> Sharding:
    for sharding in SHARDINGS:
        if sharding == name:
            return sharding
    raise UnknownNameError("sharding", name, SHARDINGS)
