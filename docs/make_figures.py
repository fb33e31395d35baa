"""Makes what the pages show of the program itself (figures, output, options): python docs/make_figures.py."""

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
        [sys.executable, "-m", "flexcp", *COMMAND.split()[1:], "--out", "docs/plan.svg"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
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


def options() -> None:
    """Write the table of run options into docs/training.md, from the configuration itself."""
    from flexcp.train.config import TrainConfig

    rows = ["| key | default | |", "|---|---|---|"]
    for name, section in TrainConfig.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            default = "" if field.default is None else f"`{field.default}`"
            rows.append(f"| `{name}.{key}` | {default} | {field.description or ''} |")
    block = "\n".join(["<!-- options -->", *rows, "<!-- /options -->"])
    page = ROOT / "docs/training.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"<!-- options -->.*<!-- /options -->", lambda _: block, text, flags=re.S), encoding="utf-8"
    )


if __name__ == "__main__":
    figures()
    options()
