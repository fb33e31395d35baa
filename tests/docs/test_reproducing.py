"""docs/reproducing.md shows what `flexcp reproduce` prints (`make tables`)."""

import importlib.util
import re
from pathlib import Path
from statistics import fmean

import pytest

from flexcp.cli.reproduce import EXPERIMENTS, run
from flexcp.reproduce.fitting import FITTED_MAIN, FITTED_SCHEDULE
from flexcp.reproduce.published import PUBLISHED
from flexcp.reproduce.result import ExperimentSetup

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reproducing.md").read_text(encoding="utf-8")


def make_tables():
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_wall_times(page: str) -> str:
    """Measured milliseconds, the last two cells of the planning table, differ from run to run."""
    head, rest = page.split("**Milliseconds of planning a step**")
    return head + re.sub(r"\| [\d.]+ \| [\d.]+ \|$", "| ms | ms |", rest, flags=re.M)


def test_every_block_is_there_once():
    names = [*EXPERIMENTS, "constants", "lengths"]

    assert sorted(re.findall(r"<!-- (\w+) -->\n", PAGE)) == sorted(names)
    assert make_tables().filled(PAGE, dict.fromkeys(names, "x")).count("\nx\n") == len(names)


def test_published_numbers_are_on_the_page():
    """Every row of the main table stands there with its published seconds and ratio."""
    for row in PUBLISHED.main:
        assert re.search(rf"\| {row.model} \| {row.data} \|[^\n]* {row.fcp_s:.2f} \|", PAGE)
        baseline = rf"{row.baseline} \| {row.baseline_s:.2f} \|[^\n]* {row.ratio:.2f} \|"
        assert re.search(rf"\| {row.model} \| {row.data} \| {baseline}", PAGE)


def test_page_counts_right():
    """In how many rows the published ratio lies between ours with and without the filling attended."""
    table = PAGE.split("**The best static layout of the paper, and its ratio to FCP**")[1].split("**")[0]
    rows = [line.split("|")[-4:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    between = sum(float(low) <= float(published) <= float(high) for published, high, low in rows)
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

    assert len(rows) == len(PUBLISHED.main) + 1
    assert f"in {words[between]} of ten rows" in PAGE


def test_fitted_rows_are_met_on_the_page():
    """Every number marked (fit) that has a published one beside it is within 1 % of it."""
    marked = [line for line in PAGE.splitlines() if " (fit) |" in line]
    off = [float(cell) for line in marked for cell in re.findall(r"\(fit\) \| ([+-][\d.]+)%", line)]

    assert len(marked) == len(FITTED_MAIN) + len(FITTED_SCHEDULE) + 1
    assert len(off) == len(marked) + 1  # that of the scaling table stands in two columns
    assert max(map(abs, off)) < 1.0


def test_prose_follows_the_tables():
    """Who gains and who loses against a fair static layout, and what is said of single rows."""
    table = PAGE.split("**The same with policy `flexcp`, and against a fair static layout**")[1]
    rows = [line.split("|")[1:-1] for line in table.split("\n\n")[1].splitlines()[2:]]
    over = {(m.strip(), d.strip()): float(fair) / float(paper) for m, d, _, fair, _, paper, *_ in rows}
    mean = {data: fmean(x for (_, d), x in over.items() if d == data) for _, data in over}
    faster = [float(row[-2]) for row in rows]
    off = dict(re.findall(r"\| (internvl3-8b \| \w+|llama3.2-1b \| \w+) \|[^\n]* -([\d.]+)% \|\n", PAGE))

    assert abs(mean["github"] - 1) < 0.01
    assert 1.01 < mean["wikipedia"] < 1.025
    assert max(mean["msrvtt"], mean["openvid"]) < 0.995
    assert mean["commoncrawl"] > 1.2
    assert min(faster) >= 1.0
    assert f"and {float(off['llama3.2-1b | wikipedia']):.0f} % less here" in PAGE
    low, high = (float(off[f"internvl3-8b | {data}"]) for data in ("msrvtt", "openvid"))
    assert f"**InternVL3** takes {low:.0f} to {high:.0f} % less" in PAGE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_page_is_what_the_command_prints():
    """Every table, but for wall times."""
    tables = make_tables()
    printed = tables.blocks({name: run(name, ExperimentSetup()) for name in EXPERIMENTS})

    assert without_wall_times(tables.filled(PAGE, printed)) == without_wall_times(PAGE)
