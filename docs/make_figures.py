"""Makes the figures and the command output that the README shows: python docs/make_figures.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTHS = "tests/data/python_source_lengths_qwen.json"
COMMAND = f"flexcp plan {LENGTHS} --model qwen3-8b --hardware h100 --ranks 64 --tokens-per-rank 8192"


def figures() -> None:
    """Draw docs/plan.svg and put the real output of the same command into the README."""
    shown = subprocess.run(
        [sys.executable, "-m", "flexcp", *COMMAND.split()[1:], "--svg", "docs/plan.svg"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    shown = "\n".join(line.rstrip() for line in shown.splitlines())
    block = f"<!-- plan-output -->\n```text\n$ {COMMAND}\n{shown}\n```\n<!-- /plan-output -->"
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = re.sub(r"<!-- plan-output -->.*<!-- /plan-output -->", lambda _: block, text, flags=re.S)
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    figures()
