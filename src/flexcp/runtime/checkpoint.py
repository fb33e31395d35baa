"""Checkpoints that are either whole or not there: written aside, then renamed.

Weights and optimizer states go through torch.distributed.checkpoint, so they can be read by any number of
ranks; what else a run needs is one small JSON file beside them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from flexcp.core.errors import CheckpointError, SaveError
from flexcp.runtime.collectives import alike, broadcast_text, raise_together
from flexcp.runtime.safe_reader import SafeLoadPlanner, SafeReader
from flexcp.runtime.status import tell

_STATE = "flexcp.json"
_OLD = ".old"  # a checkpoint that another one of the same step is about to replace
_IDS = "save_id"  # the same in the file of every rank and in the JSON part
_REMOVE = "Remove this checkpoint to resume from an older one."
_SCHEMA = "flexcp.checkpoint/1"


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write `folder/step-<step>`, then remove all but the `keep` newest. Called by all ranks.

    Raises:
        SaveError: it could not be written (a full disk, say); older checkpoints are untouched.
    """
    target = folder / f"step-{step:08d}"
    aside = target.with_suffix(".tmp")
    rank = dist.get_rank()
    first, save_id = rank == 0, broadcast_text(uuid.uuid4().hex, 0, "a checkpoint")

    def prepare() -> None:
        if first:
            _remove(aside)
            aside.mkdir(parents=True)

    def write() -> None:
        weights, optimizer_state = get_state_dict(model, optimizer)
        own = {"model": weights, "optimizer": optimizer_state, _IDS: {str(rank): save_id}}
        save(own, checkpoint_id=aside)
        if first:
            (aside / _STATE).write_text(json.dumps({"schema": _SCHEMA, "step": step, _IDS: save_id, **state}))
            if target.exists():  # it stands until the new one does
                _remove(target.with_suffix(_OLD))
                target.rename(target.with_suffix(_OLD))
            aside.rename(target)

    tell("writing a checkpoint", step)
    for part in (prepare, write):
        _together(part, step, aside)
    if first:
        kept = checkpoints(folder)[-keep:]
        for path in folder.glob("step-????????*"):
            if path not in kept:
                _remove(path)
    return target


def _remove(path: Path) -> None:
    """First what makes it a checkpoint: a removal that is cut short must not leave one that looks whole.

    What cannot be removed stays, for what was to be saved is saved; so may what is there in its place.
    """
    with contextlib.suppress(OSError):
        (path / _STATE if path.is_dir() and not path.is_symlink() else path).unlink()
    shutil.rmtree(path, ignore_errors=True)


def _together(part: Callable[[], None], step: int, aside: Path) -> None:
    """Run a part on all ranks; if it fails on one, it fails on all, and nothing is left behind."""
    trouble: BaseException | None = None
    try:
        part()
    except (Exception, CheckpointException) as error:
        trouble = SaveError(
            f"the checkpoint of step {step} could not be written: {_cause(error)}",
            "Older checkpoints are untouched. Make room, then resume from the newest one.",
        )
    try:
        raise_together(trouble, "a checkpoint")
    except SaveError:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read weights and optimizer states; all ranks call it. The rest of it is `read_state`.

    Nothing in the files can run; see `runtime.safe_reader`.

    Raises:
        CheckpointError: not a checkpoint, another version, damaged, files of several checkpoints, or weights
            of another shape.
    """
    with alike("reading a checkpoint"):
        if dist.get_rank() == 0:
            _require_one_save(path)
    weights, optimizer_state = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": optimizer_state}
    try:
        load(loaded, storage_reader=SafeReader(path), planner=SafeLoadPlanner())
    except (Exception, CheckpointException) as error:
        raise _not_loaded(path, error) from error
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])


def _require_one_save(path: Path) -> None:
    """All files are of the save that the JSON part is of: those of another step would fit as well."""
    own = read_state(path).get(_IDS)
    reader = SafeReader(path)
    try:
        parts = [part for index, part in reader.parts() if index.fqn.startswith(f"{_IDS}.")]
    except CheckpointError:
        raise
    except Exception as error:  # an unpickler fails in every way
        raise CheckpointError(
            f"{path / '.metadata'} is damaged or missing ({type(error).__name__}: {error})", _REMOVE
        ) from error
    for part in parts:
        try:
            save_id = reader.read_value(part)
        except Exception as error:
            raise _not_loaded(path, error) from error
        if save_id != own:
            raise CheckpointError(
                f"{path / part.relative_path} and {path / _STATE} are of different checkpoints", _REMOVE
            )


def _not_loaded(path: Path, error: BaseException) -> CheckpointError:
    _, root = _root(error)
    if isinstance(root, CheckpointError):
        return CheckpointError(f"{path}: {root.cause}", root.remedy)
    if isinstance(root, OSError):
        return CheckpointError(f"{path} cannot be read: {_cause(error)}", _REMOVE)
    return CheckpointError(
        f"{path} does not fit this model: {_cause(error)}",
        "Resume with the config it was made with, or remove it to resume from an older one.",
    )


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is of another version.
    """
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
        schema = state["schema"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a FlexCP checkpoint ({error})", _REMOVE) from error
    if schema != _SCHEMA:
        raise CheckpointError(
            f"{path} has schema {schema!r}; this version reads {_SCHEMA!r}",
            "Resume with the version of FlexCP that wrote it.",
        )
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in `folder`, oldest first."""
    found = {}
    for suffix in (_OLD, ""):  # one that was set aside counts only until its successor stands
        for state in folder.glob(f"step-????????{suffix}/{_STATE}"):
            found[state.parent.stem] = state.parent
    return [found[step] for step in sorted(found)]


def _cause(error: BaseException) -> str:
    """Rank and root cause in one line; torch wraps what went wrong on other ranks."""
    rank, root = _root(error)
    return f"rank {rank}: {type(root).__name__}: {root}".splitlines()[0]


def _root(error: BaseException) -> tuple[int, BaseException]:
    if isinstance(error, CheckpointException):
        rank, (root, _) = next(iter(error.failures.items()))
        return rank, root
    return dist.get_rank(), error
