"""What the engine must remember, in the checkpoints of a Hugging Face trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from flexcp.core.errors import CheckpointError
from flexcp.runtime.engine import Engine

STATE_FILE = "flexcp.json"


class KeepsState(TrainerCallback):
    """Writes the engine's state into every checkpoint, beside `trainer_state.json`.

    Args:
        engine: the one that trains; None between trainings.
    """

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self._engine = engine

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer when a checkpoint is written."""
        folder, engine = Path(args.output_dir) / f"checkpoint-{state.global_step}", self._engine()
        if engine is not None and state.is_world_process_zero and folder.is_dir():
            (folder / STATE_FILE).write_text(json.dumps(engine.state_dict()), encoding="utf-8")


def resume(engine: Engine, given: str | Path | bool, output_dir: str, step: int) -> None:
    """Continue as the engine that left a checkpoint; nothing if a plain trainer left it.

    Args:
        engine: new.
        given: the checkpoint's folder, or True for the newest of `output_dir`.
        output_dir: of the trainer.
        step: that it goes on from.

    Raises:
        ConfigError: seed or batch differ, so other samples would follow.
        CheckpointError: what the engine left cannot be read.
    """
    folder = Path(output_dir) / f"checkpoint-{step}" if isinstance(given, bool) else Path(given)
    path = folder / STATE_FILE
    if not path.exists():
        return
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})", "Resume from another one.") from error
    engine.load_state_dict(state)
