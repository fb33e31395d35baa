"""A calibration: what a profile of one machine found, as a value and as a versioned JSON file.

It stands where a hardware preset stands (`Calibration.hardware`), so planner and trainer take either. The
time coefficients are turned into rates by the counted operations of the model that was measured; the same
counts scale them to other models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from flexcp.core.errors import InputError
from flexcp.core.model_shape import ModelShape
from flexcp.cost.fit import TERMS, fit_cost
from flexcp.cost.flops import flops_per_pair, flops_per_token
from flexcp.cost.measurements import Measurement
from flexcp.cost.memory import memory_model
from flexcp.cost.model import CostModel, Link, cost_model
from flexcp.cost.presets import Hardware, hardware

CALIBRATION_SCHEMA = "flexcp.calibration/1"
CLOCKS = ("cpu", "wall")

_FAR = 4.0  # lengths beyond so many times the measured range are extrapolated
_FAR_MEMORY = 2.0  # measured and counted memory that differ by more deserve a look


@dataclass(frozen=True)
class Setup:
    """Where and how the tasks were measured.

    Attributes:
        device: name of what one rank computes on.
        clock: `cpu`, core-seconds of the process, where ranks share cores; else `wall`.
        date: ISO date of the measurement.
        versions: package to version.
        model: what was run.
        checkpointing: whether its layers were recomputed in the backward pass.
        element_bytes: bytes of an activation.
        link: one direction between neighbours of a ring, measured in the same clock.
        memory_bytes: memory of one rank.
        memory_bytes_per_token: by how much peak memory grew with a token; None where it was not seen to grow.
    """

    device: str
    clock: str
    date: str
    versions: Mapping[str, str]
    model: ModelShape
    checkpointing: bool
    element_bytes: int
    link: Link
    memory_bytes: int
    memory_bytes_per_token: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Fitted coefficients of one machine and model.

    Attributes:
        setup: where and how it was measured.
        coefficients: seconds per unit, one for each name in `cost.fit.TERMS`.
        spreads: term to how far its value moves when a fold is left out, over the value.
        error_mean, error_max: cross-validated relative error of a task.
        measurements: tasks that went into the fit.
        tokens: fewest and most tokens of a task.
        longest_tokens: the longest sample: the most tokens of a task with one.
        degrees: those measured.
        outliers: tasks that were left out, in words.
    """

    setup: Setup
    coefficients: Mapping[str, float]
    spreads: Mapping[str, float]
    error_mean: float
    error_max: float
    measurements: int
    tokens: tuple[int, int]
    longest_tokens: int
    degrees: tuple[int, ...]
    outliers: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware:
        """The machine as `cost.cost_model` and `cost.tokens_per_rank` take it.

        Efficiencies are 1 with rates that were reached: `flops_per_s` outside of attention, and attention
        in proportion to it. Links between nodes are taken to be like those inside.
        """
        setup, shape, own = self.setup, self.setup.model, self.coefficients
        passes = 3 if setup.checkpointing else 2
        rate = flops_per_token(shape, checkpointing=setup.checkpointing) / own["token_s"]
        pair_rate = flops_per_pair(shape, checkpointing=setup.checkpointing) / own["pair_s"]
        return Hardware(
            name=setup.device,
            flops_per_s=rate,
            matmul_efficiency=1.0,
            attention_efficiency=pair_rate / rate,
            memory_bytes=setup.memory_bytes,
            intra_bytes_per_s=setup.link.bytes_per_s,
            intra_latency_s=setup.link.latency_s,
            inter_bytes_per_s=setup.link.bytes_per_s,
            inter_latency_s=setup.link.latency_s,
            pack_overhead_s=own["pack_s"] / shape.layers,
            ring_step_overhead_s=own["ring_step_s"] / (shape.layers * passes),
            sample_overhead_s=own["sample_s"] / shape.layers,
            element_bytes=setup.element_bytes,
            origin=f"Measured on {setup.date} with {self.measurements} tasks of {shape.name}.",
            token_scale=self._token_scale,
        )

    @property
    def _token_scale(self) -> float:
        """Measured over counted bytes of a token; 1 where memory was not seen to grow."""
        setup = self.setup
        if setup.memory_bytes_per_token is None:
            return 1.0
        counted = memory_model(
            setup.model, 1, element_bytes=setup.element_bytes, checkpointing=setup.checkpointing
        )
        return setup.memory_bytes_per_token / counted.bytes_per_token

    @property
    def cost(self) -> CostModel:
        """The time formula for the model that was measured."""
        return cost_model(self.setup.model, self.hardware, checkpointing=self.setup.checkpointing)

    def require_device(self, device: str) -> None:
        """Refuse to stand for another device.

        Raises:
            InputError: names both.
        """
        if device != self.setup.device:
            raise InputError(
                f"the calibration was measured on {self.setup.device}, this rank runs on {device}",
                "Run flexcp profile on this machine.",
            )

    def notices(self, shape: ModelShape, longest_tokens: int, max_degree: int) -> tuple[str, ...]:
        """What the user should know before times are predicted far from what was measured.

        Args:
            shape: the model to plan for.
            longest_tokens: the longest sample.
            max_degree: the widest group that can occur.
        """
        found = []
        model = self.setup.model
        if longest_tokens > _FAR * self.longest_tokens:
            found.append(
                f"The longest sample has {longest_tokens:,} tokens, the calibration saw "
                f"{self.longest_tokens:,}: times of long samples are extrapolated."
            )
        if max_degree > _FAR * max(self.degrees):
            found.append(
                f"Groups may have {max_degree} ranks, the calibration saw {max(self.degrees)}: "
                "times of wide groups are extrapolated."
            )
        if replace(shape, name=model.name) != model:
            found.append(
                f"The calibration is of another model ({model.name}, {model.layers} layers x {model.hidden})"
                ": its times are scaled by counted operations."
            )
        if not 1 / _FAR_MEMORY <= self._token_scale <= _FAR_MEMORY:
            found.append(
                f"A token was measured to take {self._token_scale:.1f} times the bytes that are counted for it: "
                "tokens per rank follow the measurement."
            )
        return tuple(found)

    def to_json(self) -> str:
        """The file's text; `from_json` reads it."""
        return json.dumps({"schema": CALIBRATION_SCHEMA, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "calibration") -> Calibration:
        """Read what `to_json` wrote.

        Args:
            text: the file's text.
            source: what messages call it.

        Raises:
            InputError: not JSON, another version, or a field that is missing or impossible; it is named.
        """
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise InputError(
                f"{source} is not JSON: {error}", "It may have been cut off; run flexcp profile again."
            ) from None
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if schema != CALIBRATION_SCHEMA:
            raise InputError(
                f"{source} has schema {schema!r}, this FlexCP reads {CALIBRATION_SCHEMA!r}",
                "Run flexcp profile with this version.",
            )
        return _Reader(raw, source).calibration()


def fit(measurements: Sequence[Measurement], setup: Setup, *, seed: int = 0) -> Calibration:
    """Fit measured tasks; outliers are left out and named.

    Args:
        measurements: tasks of `setup.model`, in the clock of `setup`.
        setup: where and how they were measured.
        seed: of the folds of the cross-validation.

    Raises:
        InputError: a row is no measurement, or the rows cannot tell the terms apart.
    """
    base = _unfitted(setup)
    found = fit_cost(measurements, base, seed=seed)
    kept = [row for row in measurements if row not in found.outliers]
    tokens = [row.load.tokens for row in kept]
    singles = [row.load.tokens for row in kept if row.load.samples == 1]
    return Calibration(
        setup=setup,
        coefficients={term: getattr(found.cost, term) for term in TERMS},
        spreads=found.spreads,
        error_mean=found.error_mean,
        error_max=found.error_max,
        measurements=len(kept),
        tokens=(min(tokens), max(tokens)),
        longest_tokens=max(singles, default=max(tokens)),
        degrees=tuple(sorted({row.degree for row in kept})),
        outliers=tuple(str(row) for row in found.outliers),
    )


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        InputError: it cannot be read, or holds no calibration; the field is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", "flexcp profile writes one.") from error
    return Calibration.from_json(text, str(path))


def is_calibration(name: str) -> bool:
    """Whether a name of hardware is the path of a calibration file."""
    return name.endswith(".json")


def hardware_at(name: str) -> Hardware:
    """A preset by name, or a calibration by its path, which ends in `.json`.

    Raises:
        UnknownNameError: no preset of that name.
        InputError: the file holds no calibration.
    """
    return read_calibration(Path(name)).hardware if is_calibration(name) else hardware(name)


def _unfitted(setup: Setup) -> CostModel:
    """Links, bytes and layers of what was measured; the time coefficients are any."""
    any_times = dict.fromkeys(TERMS, 1.0)
    blank = Calibration(setup, any_times, {}, 0.0, 0.0, 0, (0, 0), 0, (1,))
    return blank.cost


class _Reader:
    """Takes a calibration out of JSON, field by field."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self._raw, self._source = raw, source

    def calibration(self) -> Calibration:
        tokens = self._counts("tokens", 1)
        if len(tokens) != 2:
            raise self._wrong("tokens", list(tokens), "two whole numbers, fewest and most")
        return Calibration(
            setup=self._setup(),
            coefficients={
                term: self._number(f"coefficients.{term}", positive=term in TERMS[:2]) for term in TERMS
            },
            spreads={term: self._number(f"spreads.{term}") for term in TERMS},
            error_mean=self._number("error_mean"),
            error_max=self._number("error_max"),
            measurements=self._count("measurements", 1),
            tokens=(tokens[0], tokens[1]),
            longest_tokens=self._count("longest_tokens", 1),
            degrees=self._counts("degrees", 1),
            outliers=tuple(self._text(f"outliers.{index}") for index in range(len(self._list("outliers")))),
        )

    def _setup(self) -> Setup:
        clock = self._text("setup.clock")
        if clock not in CLOCKS:
            raise self._wrong("setup.clock", clock, " or ".join(CLOCKS))
        per_token = self._at("setup.memory_bytes_per_token")
        if per_token is not None:
            per_token = self._number("setup.memory_bytes_per_token", positive=True)
        versions = self._at("setup.versions")
        if not isinstance(versions, dict):
            raise self._wrong("setup.versions", versions, "package names with versions")
        return Setup(
            device=self._text("setup.device"),
            clock=clock,
            date=self._text("setup.date"),
            versions={name: str(version) for name, version in versions.items()},
            model=self._model(),
            checkpointing=self._flag("setup.checkpointing"),
            element_bytes=self._count("setup.element_bytes", 1),
            link=Link(
                self._number("setup.link.bytes_per_s", positive=True), self._number("setup.link.latency_s")
            ),
            memory_bytes=self._count("setup.memory_bytes", 1),
            memory_bytes_per_token=per_token,
        )

    def _model(self) -> ModelShape:
        """Names as they are, `tied` a flag, all others counts."""
        values: dict[str, Any] = {}
        for field in fields(ModelShape):
            name = f"setup.model.{field.name}"
            if field.name == "name":
                values["name"] = self._text(name)
            elif field.name == "tied":
                values["tied"] = self._flag(name)
            else:
                values[field.name] = self._count(name, 0 if field.name == "extra_parameters" else 1)
        return ModelShape(**values)

    def _at(self, name: str) -> Any:
        value: Any = self._raw
        for part in name.split("."):
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (KeyError, TypeError):
                raise InputError(
                    f"{self._source}: {name} is missing",
                    "It may have been cut off; run flexcp profile again.",
                ) from None
        return value

    def _number(self, name: str, *, positive: bool = False) -> float:
        value = self._at(name)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < 0 or (positive and value == 0):
            raise self._wrong(name, value, "a finite number " + ("above 0" if positive else "of 0 or more"))
        return float(value)

    def _count(self, name: str, least: int) -> int:
        value = self._at(name)
        if type(value) is not int or value < least:
            raise self._wrong(name, value, f"a whole number, at least {least}")
        return value

    def _counts(self, name: str, least: int) -> tuple[int, ...]:
        count = len(self._list(name))
        if not count:
            raise self._wrong(name, [], "a list that holds something")
        return tuple(self._count(f"{name}.{index}", least) for index in range(count))

    def _list(self, name: str) -> list[Any]:
        value = self._at(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return value

    def _text(self, name: str) -> str:
        value = self._at(name)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, value, "a text")
        return value

    def _flag(self, name: str) -> bool:
        value = self._at(name)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> InputError:
        return InputError(f"{self._source}: {name} is {value!r}", f"It must be {wanted}.")
