"""Multi-rank tests: real processes over gloo, a deadline for each, and every rank's output on failure.

A thin coat over `flexcp.runtime.launch.launch`, so that the tests exercise what users run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 150.0  # several times what it takes alone: machines are shared


def run_ranks(
    target: Callable[..., Any], nproc: int, *args: Any, deadline_s: float = DEADLINE_S
) -> list[Any]:
    """Run `target(world, *args)` on `nproc` ranks; what each returned, by rank.

    `target` must be importable by name (a module-level function of a test module).
    """
    from flexcp.runtime.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        try:
            return launch(
                target, nproc, args, deadline_s=deadline_s, timeout_s=deadline_s / 2, log_dir=Path(folder)
            )
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                text = log.read_text(errors="replace").strip()
                print(f"--- {log.stem} ---\n{text[-4000:]}")
            raise
