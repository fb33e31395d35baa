"""The short form of each measuring script: it runs, and its page has its parts. How fast is not asked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = ["--short", "seed 0", "flexcp", "torch", "numpy", "Python", "cores", "load average"]
# Script -> what its page says, and the first cells of the rows of its tables.
PAGES = {
    "emulated": (
        ["**This is an emulation.**", "2 ranks"],
        [(mode, policy) for mode in ("free-running", "lockstep") for policy in ("flexcp", "paper", "static")],
    ),
    "replay": (
        ["Messages cost nothing"],
        [(mode, policy) for mode in ("free-running", "lockstep") for policy in ("flexcp", "paper", "static")],
    ),
    "real": (["mix of 300, 6,000 and 50,000 tokens"], [("flexcp",), ("static",)]),
    "overhead": (["Engine on one rank", "Ring of two"], [("wall-clock",), ("processor",)]),
}


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=() if script == "emulated" else pytest.mark.slow) for script in PAGES],
)
def test_short_form_runs_and_its_page_has_its_parts(script: str, tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    command = [sys.executable, f"benchmarks/{script}.py", "--short", "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    page = out.read_text(encoding="utf-8")
    said, rows = PAGES[script]
    head = page.partition("\n\n**")[0] if script == "emulated" else page
    assert [part for part in HEAD if part not in head] == []
    assert [part for part in said if part not in page] == []
    for cells in rows:
        row = re.search(r"^\| " + r" \| ".join(map(re.escape, cells)) + r"[^\n]*\|$", page, flags=re.M)
        assert row is not None, cells
        assert re.search(r"\| \d+\.\d+ \|", row[0]), row[0]
