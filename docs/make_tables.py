"""Writes the tables of docs/reproducing.md from the experiments themselves: python docs/make_tables.py."""

import re
from pathlib import Path

import numpy as np

from flexcp.cli.reproduce import EXPERIMENTS, run
from flexcp.reproduce.result import ExperimentSetup, Result, constants_table, markdown
from flexcp.reproduce.workloads import WORKLOADS

PAGE = Path(__file__).parent / "reproducing.md"


def blocks(results: dict[str, Result]) -> dict[str, str]:
    """What belongs between the marks of each name."""
    constants = next(iter(results.values())).constants
    tables = {name: result.as_markdown() for name, result in results.items()}
    return {**tables, "constants": markdown(constants_table(constants)), "lengths": lengths(results)}


def lengths(results: dict[str, Result]) -> str:
    """Every distribution, with its scale, and where its numbers are from."""
    constants = next(iter(results.values())).constants
    lines = ["| data set | median | 99 % | mean | longest | origin |", "|---|---:|---:|---:|---:|---|"]
    for name, shape in WORKLOADS.items():
        data = constants.workload(name)
        median, high = data.tokens(np.array([0.5, 0.99])).tolist()
        lines.append(
            f"| {name} | {median:,} | {high:,} | {data.mean_tokens():,.0f} | {data.longest_tokens:,} "
            f"| {shape.origin} |"
        )
    return "\n".join(lines)


def filled(page: str, texts: dict[str, str]) -> str:
    """The page with every block replaced."""
    for name, text in texts.items():
        block = f"<!-- {name} -->\n{text}\n<!-- /{name} -->"
        page, count = re.subn(rf"<!-- {name} -->.*<!-- /{name} -->", lambda _, b=block: b, page, flags=re.S)
        if count != 1:
            raise SystemExit(f"{PAGE}: the block {name} is there {count} times")
    return page


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        filled(page, blocks({name: run(name, ExperimentSetup()) for name in EXPERIMENTS})), encoding="utf-8"
    )
