"""The entry of a folder that was meant, where a mistyped path leads to nothing."""

from __future__ import annotations

import difflib
from pathlib import Path


def near_path(path: Path, otherwise: str = "Check the path.") -> str:
    """The remedy for a path where nothing is: the nearest name beside it, or else `otherwise`."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"Did you mean {path.parent / close[0]}?" if close else otherwise
