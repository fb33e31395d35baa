"""Where the curves of a run go: TensorBoard, Weights & Biases, or what else `make_trackers` makes."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flexcp.core.errors import ConfigError, MissingExtraError

Values = Mapping[str, float]


class Tracker(Protocol):
    """Keeps the numbers of one attempt at a run; used on rank 0 alone."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Called once, before the first step, with the resolved configuration."""
        ...

    def log(self, step: int, values: Values) -> None:
        """Numbers of one step, by names such as `train/loss`; steps never fall."""
        ...

    def summary(self, values: Values) -> None:
        """Numbers of the whole run; not called where it fails."""
        ...

    def close(self, failed: bool) -> None:
        """Called once, after `start`, however the run ends."""
        ...


class TensorBoard:
    """Event files in a folder.

    Args:
        folder: of the event files.
        first_step: what an earlier attempt wrote from here on is hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step

    def start(self, config: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
        self._hook = threading.excepthook
        threading.excepthook = self._pass_over
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```", self._first_step)

    def log(self, step: int, values: Values) -> None:
        """See `Tracker`."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def summary(self, values: Values) -> None:
        """See `Tracker`."""
        rows = "".join(f"| {name} | {value:.6g} |\n" for name, value in values.items())
        self._writer.add_text("summary", f"| | |\n|---|---|\n{rows}", self._first_step)

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        try:
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _pass_over(self, told: threading.ExceptHookArgs) -> None:
        """What the thread of the writer cannot write, the next `log` or `close` raises: no trace too."""
        if not type(told.thread).__module__.startswith("tensorboard."):
            self._hook(told)


class WeightsAndBiases:
    """A run of wandb, which is told all else (project, mode, key) by its own `WANDB_*` variables.

    Every attempt is a run of its own, since wandb cannot take steps back; those of one run folder share its
    name as their group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, config: Mapping[str, Any]) -> None:
        """See `Tracker`.

        Raises:
            MissingExtraError: wandb is not installed.
            ConfigError: it does not start: there is no key, or no network.
        """
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        name = self._folder.resolve().name
        try:
            self._run = wandb.init(dir=str(self._folder), name=name, group=name, config=dict(config))
        except Exception as error:  # of many kinds: wandb's own, those of its network
            raise ConfigError(
                f"wandb does not start: {error}",
                'Log in with `wandb login`, set WANDB_MODE=offline, or leave "wandb" out of run.trackers.',
            ) from error

    def log(self, step: int, values: Values) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def summary(self, values: Values) -> None:
        """See `Tracker`."""
        self._run.summary.update(dict(values))

    def close(self, failed: bool) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=int(failed))


def make_trackers(names: Sequence[str], folder: Path, first_step: int) -> list[Tracker]:
    """Those of `run.trackers`, not started; what they need is imported when they start."""
    made: dict[str, Tracker] = {
        "tensorboard": TensorBoard(folder / "tensorboard", first_step),
        "wandb": WeightsAndBiases(folder),
    }
    return [made[name] for name in names]
