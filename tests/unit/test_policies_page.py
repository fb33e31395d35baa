"""docs/planner.md: its Python runs, its commands run, its table of policies is the table of policies."""

import re
from pathlib import Path

import pytest

from flexcp.cli import main
from flexcp.planner import POLICIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^flexcp (plan .*)$", PAGE, flags=re.M)


def test_python_of_the_page_runs():
    """Its assertions are part of it: the example of 300, 6,000 and 50,000 tokens (D64)."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)

    assert "plan" in names


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_run(command, monkeypatch, capfd):
    """Each exits 0 and shows a verdict."""
    monkeypatch.chdir(ROOT)

    assert main(command.split()) == 0
    assert "the bound" in " ".join(capfd.readouterr().out.split())


def test_every_policy_has_a_row():
    """A new policy is explained, an old one does not linger."""
    section = PAGE.split("## Policies")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", section, flags=re.M)) == set(POLICIES)


def test_the_table_of_gaps_is_filled():
    """Made by docs/make_figures.py; flexcp is closer to the bound than paper in every row."""
    rows = re.findall(r"^\| \d+ \| [\d,]+ \|(.*)\|$", PAGE, flags=re.M)

    assert len(rows) == 4
    for row in rows:
        _, paper, _, _, lockstep, free = [cell.strip() for cell in row.split("|")]
        assert 1 <= float(free) <= float(lockstep) <= float(paper)
