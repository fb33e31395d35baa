"""Every example is run as a reader would run it, and prints what its `.out` file says."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# tests/megatron runs that of Megatron, which needs a shim where there is no GPU; tests/trainers that of TRL,
# which takes ranks and prints times.
ELSEWHERE = {"megatron_pretrain.py", "transformers_sft.py"}
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name not in ELSEWHERE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_prints_what_it_did(script):
    """Same seed, same plans, same output."""
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)

    assert run.returncode == 0, run.stderr
    assert script.with_suffix(".out").read_text() == run.stdout


def test_there_are_examples():
    """The parametrisation above is not empty."""
    assert SCRIPTS
    assert all((EXAMPLES / name).is_file() for name in ELSEWHERE)
