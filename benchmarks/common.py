"""What the measuring scripts share: the head of a page, the lists, paired ratios. It measures nothing."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

import flexcp
from flexcp.core.lengths import read_lengths

ROOT = Path(__file__).parents[1]
PYTHON_LIST = ROOT / "tests/data/python_source_lengths_qwen.json"


def head(title, seed, load):
    """Title, command, machine, versions, seed, and how busy the machine was before and after."""
    command = " ".join([Path(sys.argv[0]).name, *(Path(word).name for word in sys.argv[1:])])
    return [
        f"# {title}",
        "",
        f"`python benchmarks/{command}`, seed {seed}; flexcp {flexcp.__version__},",
        f"torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()};",
        f"{processor()}, {len(os.sched_getaffinity(0))} cores, load average {load:.1f} at the start",
        f"and {os.getloadavg()[0]:.1f} at the end (the ranks of the run included).",
        "",
    ]


def processor():
    """What the machine calls its processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{platform.machine()} ({line.partition(':')[2].strip()})"
    return platform.machine()


def lists(files):
    """Lengths by name of the list: the files named, `LENGTHS[:COLUMN]`, or the Python sources."""
    found = {}
    for file in files or [str(PYTHON_LIST)]:
        path, _, column = file.partition(":")
        found[Path(path).stem] = read_lengths(path, column or None)
    return found


def table(columns, rows):
    """Lines of a Markdown table."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def paired(others, ours):
    """Ratio of the sums, and the least and largest of the pairs: `1.31 (1.22–1.40)`."""
    pairs = [other / our for other, our in zip(others, ours, strict=True)]
    return f"{sum(others) / sum(ours):.3f} ({min(pairs):.3f}–{max(pairs):.3f})"


def median_of_pairs(others, ours):
    """The middle of the paired ratios: a disturbed pair does not move it."""
    return statistics.median(other / our for other, our in zip(others, ours, strict=True))


def write(name, lines, target):
    """Print a page and write it to benchmarks/results, or where `target` says."""
    file = Path(target or ROOT / f"benchmarks/results/{name}.md")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
