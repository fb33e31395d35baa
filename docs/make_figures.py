"""Makes what the pages show of the program itself (figures, output, options): python docs/make_figures.py."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

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


def planner_page() -> None:
    """Draw the plans of docs/planner.md and fill in its table, from the lists in tests/data."""
    from flexcp.core.cluster import Cluster
    from flexcp.core.model_shape import model_shape
    from flexcp.core.sample import samples_from_lengths
    from flexcp.cost import cost_model, hardware
    from flexcp.planner import make_plan
    from flexcp.planner.outcome import communication_share
    from flexcp.report.svg import plan_svg

    cost = cost_model(model_shape("qwen3-8b"), hardware("h100"))
    lengths = random.Random(0).sample(json.loads((ROOT / LENGTHS).read_text(encoding="utf-8")), 512)
    samples = samples_from_lengths(lengths)
    rows = [
        "| N | E | `static` | `paper` | idle | messages | `flexcp`, lockstep | `flexcp`, free-running |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ranks, tokens in ((32, 8192), (64, 8192), (64, 16384), (128, 8192)):
        cluster = Cluster(ranks, tokens)
        static, paper, lockstep = (
            make_plan(samples, cluster, cost, policy=name, mode="lockstep")
            for name in ("static", "paper", "flexcp")
        )
        free = make_plan(samples, cluster, cost, mode="free-running")
        idle, messages = paper.idle_share, communication_share(paper, cost)
        rows.append(
            f"| {ranks} | {tokens:,} | {static.gap:.3f} | {paper.gap:.3f} | {idle:.1%} | {messages:.1%} "
            f"| {lockstep.gap:.3f} | {free.gap:.3f} |"
        )
        if (ranks, tokens) == (64, 8192):
            (ROOT / "docs/plan_paper.svg").write_text(plan_svg(paper), encoding="utf-8")
    three = samples_from_lengths([50_000] * 4 + [6_000] * 30 + [300] * 200)
    drawn = make_plan(three, Cluster(24, 8192), cost, mode="free-running")
    (ROOT / "docs/plan_three_lengths.svg").write_text(plan_svg(drawn), encoding="utf-8")
    page = ROOT / "docs/planner.md"
    block = "\n".join(["<!-- gaps -->", *rows, "<!-- /gaps -->"])
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- gaps -->.*<!-- /gaps -->", lambda _: block, text, flags=re.S)
    page.write_text(text, encoding="utf-8")


def options() -> None:
    """Write the table of run options into docs/training.md, from the configuration itself."""
    from flexcp.train.config import TrainConfig

    rows = ["| key | default | |", "|---|---|---|"]
    for name, section in TrainConfig.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            default = "" if field.default is None else f"`{field.default}`"
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            told = [field.description or "", " \\| ".join(f"`{choice}`" for choice in choices)]
            rows.append(f"| `{name}.{key}` | {default} | {': '.join(part for part in told if part)} |")
    block = "\n".join(["<!-- options -->", *rows, "<!-- /options -->"])
    page = ROOT / "docs/training.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"<!-- options -->.*<!-- /options -->", lambda _: block, text, flags=re.S), encoding="utf-8"
    )


if __name__ == "__main__":
    figures()
    planner_page()
    options()
