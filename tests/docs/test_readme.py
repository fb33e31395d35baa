"""The README does not promise what is not there: its Python compiles or runs, its files exist."""

import re
from pathlib import Path

import pytest

from flexcp.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.S)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_blocks_are_real(number):
    """A block with the training loop needs ranks, so it is compiled; every other block runs."""
    block = compile(PYTHON[number], f"README block {number}", "exec")

    if "Engine" not in PYTHON[number]:
        names: dict[str, object] = {"__name__": "readme"}
        exec(block, names)
        assert "plan" in names


def test_readme_has_python():
    """The engine's loop and a plan are both shown."""
    assert any("Engine" in block for block in PYTHON)
    assert any("make_plan" in block for block in PYTHON)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Relative links and pictures exist."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if not (page.parent / target).exists()]

    assert missing == []


def test_plan_output_is_what_the_command_prints(monkeypatch, capfd):
    """The verdict and every policy's step time are those of today (`make readme`); planning times vary."""
    block = re.search(r"\$ flexcp (plan .*?)\n(.*?)```", README, flags=re.S)
    monkeypatch.chdir(ROOT)

    assert main(block[1].split()) == 0
    assert steps_and_verdict(capfd.readouterr().out) == steps_and_verdict(block[2])


def steps_and_verdict(shown: str) -> tuple[str, dict[str, str]]:
    """The first sentence, however it is broken into lines, and policy to step time and gap."""
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", shown).split())
    rows = re.findall(r"(static|paper|flexcp) ([\d.]+ m?s [\d.]+) [\d.]+×", words)
    return words.split(". ")[0], dict(rows)
