"""Files that `--out` names: tried before the work starts, written after it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from flexcp.core.errors import ConfigError


def require_writable(path: Path) -> None:
    """Refuse a path that no file can be written to; nothing is left behind or changed.

    Raises:
        ConfigError: its folder does not exist, or the system refuses.
    """
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"the folder of --out {path} does not exist", "Make it, or name another one.")
        if path.is_dir():
            raise ConfigError(f"--out {path} is a folder", "Name a file in it.")
        if path.is_file():
            path.open("ab").close()
        if _is_replaced(path) or not path.exists():
            # Permissions alone do not tell: some file systems take no new files, whoever asks.
            tempfile.TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        raise _refused(path, error) from None


def write_output(path: Path, text: str) -> None:
    """Write a whole file: what was there stays whole until the new one is.

    Raises:
        ConfigError: the system refuses.
    """
    try:
        if _is_replaced(path):
            _replace(path, text)
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refused(path, error) from None


def _is_replaced(path: Path) -> bool:
    """Devices, pipes and links (/dev/stdout is one) are written to, and stay what they are."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _refused(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written ({error.strerror})",
        "Name a file in a folder that exists and may be written to, with --out.",
    )
