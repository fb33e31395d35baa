"""Everything a training run can be told, as typed values; read from TOML and `--set key=value`."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.core.nearest import near_path
from flexcp.cost.calibration import hardware_at
from flexcp.cost.memory import MARGIN
from flexcp.planner import POLICIES

_SHOWN_CHARS = 200  # of a value that is wrong
_Beta = Annotated[float, Field(ge=0, lt=1)]
_Width = Annotated[int, Field(ge=1, le=2**24)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(_Section):
    """A model to go on training, or one with random weights: by a transformers config, or by shape."""

    pretrained: Path | None = Field(
        default=None, description="folder of a model to start from (config.json and safetensors)"
    )
    config: Path | None = Field(default=None, description="folder or config.json of a model; random weights")
    architecture: Literal["qwen3", "llama"] = Field(default="qwen3", description="when config is not given")
    hidden: _Width = 128
    layers: int = Field(default=4, ge=1, le=2**12)
    heads: _Width = 4
    kv_heads: _Width = 2
    head_dim: int = Field(default=32, ge=2, le=2**12, multiple_of=2, description="even: rotated in pairs")
    intermediate: _Width = 384
    tied: bool = True


class DataSection(_Section):
    """What to train on; see `flexcp.train.data`."""

    path: str = Field(
        default="@stdlib", min_length=1, description="folder, file, or @stdlib: this Python's own sources"
    )
    pattern: str = Field(default="**/*", description="files of a folder")
    exclude: tuple[str, ...] = Field(default=(), description="names of files and folders to leave out")
    text_column: str = "text"
    chat_column: str | None = Field(default=None, description="of lists of messages, read instead of text")
    learn: Literal["assistant", "all"] = Field(default="assistant", description="what of a chat is learned")
    image_column: str | None = Field(
        default=None, description="images of a row (paths or bytes), for a vision-language model"
    )
    tokenizer: str = Field(
        default="bytes",
        description="bytes, bpe:<vocab> (trained on the data), a file or its folder; unset: pretrained's own",
    )
    index_dir: Path | None = Field(default=None, description="of the length index; unset: beside the data")
    max_tokens: int | None = Field(
        default=None, ge=1, description="longest sample; unset: what the ranks hold"
    )
    too_long: Literal["error", "skip"] = "error"
    eval_samples: int = Field(default=0, ge=0, description="samples held out for evaluation")


class ParallelSection(_Section):
    """How the work is spread."""

    nproc: int = Field(default=1, ge=1, description="local ranks, when not started by torchrun")
    sharding: Literal["ddp", "fsdp2"] = "fsdp2"
    policy: str = "flexcp"
    hardware: str = Field(default="cpu", description="a preset, or the .json of `flexcp profile`")
    peak_flops_per_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="of one rank, for the MFU; unset: the preset's (of a calibration, none but on CPU)",
    )
    tokens_per_rank: int | None = Field(default=None, ge=1, description="unset: from the hardware's memory")
    memory_margin: float = Field(default=MARGIN, ge=0, lt=1, description="share of it that stays free")
    ranks_per_node: int | None = Field(default=None, ge=1, description="unset: what the launcher started")
    whole_below_tokens: int | None = Field(default=None, ge=0, description="shorter samples are never cut")
    learn_costs: bool = Field(
        default=True, description="correct predictions by measured times; false: plans depend on data alone"
    )


class OptimizerSection(_Section):
    """AdamW, linear warm-up, cosine decay."""

    lr: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    clip_norm: float | None = Field(default=1.0, gt=0, description="inf leaves gradients alone")


class RunSection(_Section):
    """How long, how often, where."""

    folder: Path = Path("runs/default")
    steps: int = Field(default=100, ge=1)
    global_batch: int = Field(default=32, ge=1, le=2**20)
    seed: int = Field(default=0, ge=0, lt=2**63)
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    gradient_checkpointing: bool = False
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only at the end")
    checkpoint_every: int = Field(
        default=0, ge=0, description="steps between checkpoints; 0: only at the end"
    )
    keep_checkpoints: int = Field(default=2, ge=1)
    save_model: bool | None = Field(
        default=None,
        description="write model/ as transformers does, at the end; unset: where model.pretrained is given",
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=("tensorboard",), description="where curves go; wandb needs flexcp[wandb]"
    )
    on_bad_loss: Literal["stop", "skip"] = Field(
        default="stop", description="a step whose loss or gradient is not finite"
    )
    new_budget: bool = Field(default=False, description="resume with another parallel.tokens_per_rank")
    timeout_s: float = Field(
        default=600.0, ge=1, le=7 * 86400, description="a rank that is silent for longer ends the run"
    )


class TrainConfig(_Section):
    """A whole run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    parallel: ParallelSection = ParallelSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply `section.key=value` overrides.

    Raises:
        ConfigError: not TOML, a wrong value; the key is named.
        UnknownNameError: an unknown key, hardware or policy; the nearest is suggested.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remedy = near_path(path, "Give the path of a run file (TOML).")
        raise ConfigError(f"{path} does not exist", remedy) from None
    except (OSError, ValueError, RecursionError) as error:  # also of names, and of numbers of 5,000 digits
        raise ConfigError(f"{path} is not a TOML file: {error}", "See examples/demo.toml.") from error
    for override in overrides:
        _apply(raw, override)
    _check_keys(raw, TrainConfig, "")
    try:
        # As JSON, strictly: a TOML string is a path where one is wanted, but "10" is no number.
        config = TrainConfig.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise _wrong_value(error, path) from None
    _check_paths(config)
    _check_model(config.model)
    if config.model.pretrained is not None and "tokenizer" not in config.data.model_fields_set:
        own = config.data.model_copy(update={"tokenizer": str(config.model.pretrained)})
        config = config.model_copy(update={"data": own})
    _check_schedule(config)
    data = config.data.path
    if not data.startswith("@") and not Path(data).exists():
        remedy = near_path(Path(data), "Paths are relative to where flexcp is started.")
        raise ConfigError(f"data.path {data} does not exist", remedy)
    # Names are looked up before any rank is started: a typing error should not cost a minute.
    hardware_at(config.parallel.hardware)
    if config.parallel.policy not in POLICIES:
        raise UnknownNameError("policy", config.parallel.policy, POLICIES)
    return config


def _wrong_value(error: ValidationError, path: Path) -> ConfigError:
    """The first of them, by its key."""
    first = error.errors()[0]
    key, value = ".".join(str(part) for part in first["loc"]), first["input"]
    remedy = f"Mend it in {path} or with --set."
    if first["type"] == "tuple_type" and isinstance(value, str):
        remedy = f'A list is wanted, also of one: {key} = ["{value[:_SHOWN_CHARS]}"]. {remedy}'
    return ConfigError(f"{key} = {repr(value)[:_SHOWN_CHARS]}: {first['msg']}", remedy)


def _check_paths(config: TrainConfig) -> None:
    """Names that no disk can hold, and those that nobody here may look at; nothing need be there."""
    model, data = config.model, config.data
    named = {
        "model.pretrained": model.pretrained,
        "model.config": model.config,
        "data.path": data.path,
        "data.tokenizer": data.tokenizer,
        "data.index_dir": data.index_dir,
        "parallel.hardware": config.parallel.hardware,
        "run.folder": config.run.folder,
    }
    for key, path in named.items():
        try:
            if path is not None:
                Path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # whoever needs it says so
        except (OSError, ValueError) as error:
            shown, why = str(path)[:_SHOWN_CHARS], getattr(error, "strerror", None) or error
            raise ConfigError(f"{key} {shown!r} cannot be used: {why}", "Name another.") from None


def _check_model(model: ModelSection) -> None:
    """The shape is said once."""
    for name in ("pretrained", "config"):
        others = sorted(model.model_fields_set - {name})
        if getattr(model, name) is not None and others:
            raise ConfigError(
                f"model.{name} is given, and {', '.join(f'model.{other}' for other in others)} too",
                "The config decides the shape: leave everything else in [model] out.",
            )
    if model.pretrained is not None and not (model.pretrained / "config.json").is_file():
        raise ConfigError(
            f"model.pretrained {model.pretrained} is no folder of a model",
            "Give a folder with config.json and model.safetensors, as save_pretrained writes it.",
        )
    if model.config is not None and not model.config.exists():
        remedy = near_path(model.config, "Give a config.json of transformers, or the folder of one.")
        raise ConfigError(f"model.config {model.config} does not exist", remedy)


def _check_schedule(config: TrainConfig) -> None:
    """Numbers that are good each by itself, and say nothing together."""
    run = config.run
    if run.eval_every and not config.data.eval_samples:
        raise ConfigError(
            f"run.eval_every is {run.eval_every}, and data.eval_samples 0: there is nothing to evaluate",
            "Hold some samples out, or leave run.eval_every out.",
        )
    if len(set(run.trackers)) < len(run.trackers):
        raise ConfigError(f"run.trackers names one twice: {', '.join(run.trackers)}", "Name each once.")


def _apply(raw: dict[str, Any], override: str) -> None:
    try:
        override.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--set {override!r} is not UTF-8", "Use names that are.") from None
    key, separator, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not separator or not dot:
        meant = _in_a_section(key.strip()) if separator else None
        remedy = f"Did you mean {meant}?" if meant else "For example --set run.steps=10"
        raise ConfigError(f"--set {override!r} is not section.key=value", remedy)
    table = raw.setdefault(section, {})
    if isinstance(table, dict):  # else validation names it
        table[name] = _value(text.strip())


def _in_a_section(name: str) -> str | None:
    """The key that was meant by a name without its section.

    >>> _in_a_section("steps"), _in_a_section("nprocs"), _in_a_section("")
    ('run.steps', 'parallel.nproc', None)
    """
    keys = {key.partition(".")[2]: key for key in flattened(TrainConfig())}
    close = difflib.get_close_matches(name, keys, n=1)
    return keys[close[0]] if close else None


def _value(text: str) -> Any:
    """A TOML value where it reads as one, else the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except (ValueError, RecursionError):
        return text


def _check_keys(raw: dict[str, Any], section: type[BaseModel], prefix: str) -> None:
    known = {f"{prefix}{name}" for name in section.model_fields}
    for name, value in raw.items():
        if f"{prefix}{name}" not in known:
            raise UnknownNameError("key", f"{prefix}{name}", known)
        inner = section.model_fields[name].annotation
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
            _check_keys(value, inner, f"{prefix}{name}.")


def flattened(config: TrainConfig) -> dict[str, str]:
    """Every key of the resolved run with its value, as `section.key`."""
    sections = config.model_dump(mode="json")
    return {
        f"{section}.{key}": json.dumps(value)
        for section, keys in sections.items()
        for key, value in keys.items()
    }


def to_json(config: TrainConfig) -> str:
    """The resolved run, as written into the run folder."""
    return json.dumps(config.model_dump(mode="json"), indent=2)
