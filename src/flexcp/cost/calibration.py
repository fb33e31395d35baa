"""A calibration: what a profile of one machine found, as a value and as a versioned JSON file.

It stands where a hardware preset stands (`Calibration.hardware`), so planner and trainer take either. The
time coefficients are turned into rates by the counted operations of the model that was measured; the same
counts scale them to other models.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from flexcp.core.errors import InputError
from flexcp.core.model_shape import Encoder, ModelShape
from flexcp.cost.fields import JsonFields
from flexcp.cost.fit import TERMS, fit_cost
from flexcp.cost.flops import flops_per_pair, flops_per_token
from flexcp.cost.measurements import Measurement
from flexcp.cost.memory import memory_model
from flexcp.cost.model import CostModel, Link, cost_model
from flexcp.cost.presets import Hardware, Origin, hardware

CALIBRATION_SCHEMA = "flexcp.calibration/2"
CLOCKS = ("cpu", "wall")

_NOTHING_TRAVELS = Link(1e18, 0.0)  # of a rank alone
_LEAST_S, _MOST_S = 1e-18, 1e6  # of a coefficient


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
        link: one direction between neighbours of a node, measured in the same clock; None where one rank was
            alone, and no message travelled in any task.
        memory_bytes: memory of one rank.
        memory_bytes_per_token: by how much peak memory grew with a token; None where it was not seen to grow.
        inter_link: the same as `link` between nodes; None where all ranks were in one.
    """

    device: str
    clock: str
    date: str
    versions: Mapping[str, str]
    model: ModelShape
    checkpointing: bool
    element_bytes: int
    link: Link | None
    memory_bytes: int
    memory_bytes_per_token: float | None = None
    inter_link: Link | None = None


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
        in proportion to it. Where no link between nodes was measured, a preset's stands in, unless the one
        inside is slower.
        """
        setup, shape, own = self.setup, self.setup.model, self.coefficients
        passes = 3 if setup.checkpointing else 2
        preset = self.link_preset
        link = setup.link or Link(preset.intra_bytes_per_s, preset.intra_latency_s)
        inter = setup.inter_link or Link(preset.inter_bytes_per_s, preset.inter_latency_s)
        rate = flops_per_token(shape, checkpointing=setup.checkpointing) / own["token_s"]
        pair_rate = flops_per_pair(shape, checkpointing=setup.checkpointing) / own["pair_s"]
        return Hardware(
            name=setup.device,
            flops_per_s=rate,
            matmul_efficiency=1.0,
            attention_efficiency=pair_rate / rate,
            memory_bytes=setup.memory_bytes,
            intra_bytes_per_s=link.bytes_per_s,
            intra_latency_s=link.latency_s,
            inter_bytes_per_s=min(inter.bytes_per_s, link.bytes_per_s),
            inter_latency_s=max(inter.latency_s, link.latency_s),
            pack_overhead_s=own["pack_s"] / shape.layers,
            ring_step_overhead_s=own["ring_step_s"] / (shape.layers * passes),
            sample_overhead_s=own["sample_s"] / shape.layers,
            element_bytes=setup.element_bytes,
            origins=self._origins,
            token_scale=self.token_scale,
        )

    @property
    def _origins(self) -> tuple[Origin, ...]:
        setup = self.setup
        profile = f"{setup.date}, {self.measurements} tasks of {setup.model.name}."
        rates = "flops_per_s attention_efficiency pack_overhead_s ring_step_overhead_s sample_overhead_s"
        links = [("intra", setup.link), ("inter", setup.inter_link)]
        return (
            Origin(rates, "measured", profile),
            Origin("memory_bytes element_bytes", "measured", profile),
            *(
                Origin(f"{name}_bytes_per_s {name}_latency_s", "measured", profile)
                if link is not None
                else Origin(
                    f"{name}_bytes_per_s {name}_latency_s",
                    "assumed",
                    f"Nobody measured this link: that of the preset {self.link_preset.name}.",
                )
                for name, link in links
            ),
            Origin("matmul_efficiency", "derived", "The rate outside of attention is one that was reached."),
        )

    @property
    def link_preset(self) -> Hardware:
        """Where links are taken from that nobody measured."""
        return hardware("cpu" if self.setup.clock == "cpu" else "h100")

    @property
    def token_scale(self) -> float:
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
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{source} is not JSON: {error}", "It may have been cut off; run flexcp profile again."
            ) from None
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if schema != CALIBRATION_SCHEMA:
            raise InputError(
                f"{source} has schema {reprlib.repr(schema)}, this FlexCP reads {CALIBRATION_SCHEMA!r}",
                "Run flexcp profile with this version.",
            )
        return _Reader(raw, source).calibration()


def fit_calibration(measurements: Sequence[Measurement], setup: Setup, *, seed: int = 0) -> Calibration:
    """Fit measured tasks; outliers are left out and named.

    Args:
        measurements: tasks of `setup.model`, in the clock of `setup`.
        setup: where and how they were measured.
        seed: of the folds of the cross-validation.

    Raises:
        InputError: a row is no measurement, or the rows cannot tell the terms apart.
    """
    base = _unfitted(replace(setup, link=setup.link or _NOTHING_TRAVELS))
    found = fit_cost(measurements, base, seed=seed)
    _refuse_implausible(found.cost)
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


def _least_s(term: str) -> float:
    """Rates are made of pairs and tokens; the others may be 0."""
    return _LEAST_S if term in TERMS[:2] else 0.0


def _refuse_implausible(cost: CostModel) -> None:
    """So that what a fit writes can be read."""
    for term in TERMS:
        value = getattr(cost, term)
        if not _least_s(term) <= value <= _MOST_S:
            raise InputError(
                f"{term} came out as {value:.3g} s",
                f"It lies between {_least_s(term):g} and {_MOST_S:g} s."
                " Are the times in seconds, and the counts those of the tasks?",
            )


class _Reader(JsonFields):
    """Takes a calibration out of JSON, field by field."""

    def calibration(self) -> Calibration:
        tokens = self.counts("tokens", 1)
        if len(tokens) != 2 or tokens[0] > tokens[1]:
            raise self.wrong("tokens", list(tokens), "two whole numbers, fewest and most")
        return Calibration(
            setup=self._setup(),
            coefficients={
                term: self.number(f"coefficients.{term}", _least_s(term), _MOST_S) for term in TERMS
            },
            spreads={term: self.number(f"spreads.{term}") for term in TERMS},
            error_mean=self.number("error_mean"),
            error_max=self.number("error_max"),
            measurements=self.count("measurements", 1),
            tokens=(tokens[0], tokens[1]),
            longest_tokens=self.count("longest_tokens", 1),
            degrees=self.counts("degrees", 1),
            outliers=tuple(self.text(f"outliers.{index}") for index in range(len(self.items("outliers")))),
        )

    def _setup(self) -> Setup:
        clock = self.text("setup.clock")
        if clock not in CLOCKS:
            raise self.wrong("setup.clock", clock, " or ".join(CLOCKS))
        per_token = self.at("setup.memory_bytes_per_token")
        if per_token is not None:
            per_token = self.number("setup.memory_bytes_per_token", 1.0)
        versions = self.at("setup.versions")
        if not isinstance(versions, dict):
            raise self.wrong("setup.versions", versions, "package names with versions")
        return Setup(
            device=self.text("setup.device"),
            clock=clock,
            date=self.text("setup.date"),
            versions={name: str(version) for name, version in versions.items()},
            model=self._model(),
            checkpointing=self.flag("setup.checkpointing"),
            element_bytes=self.count("setup.element_bytes", 1),
            link=self._link_if_any("setup.link"),
            memory_bytes=self.count("setup.memory_bytes", 1),
            memory_bytes_per_token=per_token,
            inter_link=self._link_if_any("setup.inter_link"),
        )

    def _link_if_any(self, name: str) -> Link | None:
        if self.at(name) is None:
            return None
        return Link(self.number(f"{name}.bytes_per_s", 1.0), self.number(f"{name}.latency_s", most=_MOST_S))

    def _model(self) -> ModelShape:
        """Names as they are, `tied` a flag, the encoder perhaps none, all others counts."""
        values: dict[str, Any] = {}
        for field in fields(ModelShape):
            name = f"setup.model.{field.name}"
            if field.name == "name":
                values["name"] = self.text(name)
            elif field.name == "tied":
                values["tied"] = self.flag(name)
            elif field.name == "encoder":
                values["encoder"] = None if self.at(name) is None else self._encoder(name)
            else:
                values[field.name] = self.count(name, 0 if field.name == "extra_parameters" else 1)
        return ModelShape(**values)

    def _encoder(self, name: str) -> Encoder:
        parts = [field.name for field in fields(Encoder) if field.name != "both_ways"]
        counts = {part: self.count(f"{name}.{part}", part != "window_patches") for part in parts}
        both_ways = "both_ways" in self.at(name) and self.flag(f"{name}.both_ways")  # not in older files
        return Encoder(**counts, both_ways=both_ways)
