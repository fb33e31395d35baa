"""What a base install can do: the heart and `flexcp plan` in an interpreter that cannot import torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run_folders import BATCHES, write_run

from flexcp.core.cluster import Cluster

LENGTHS = Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json"
HEAVY = ("torch", "transformers", "tokenizers", "pyarrow", "tensorboard", "scipy", "wandb")

BLOCK = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in which nothing heavy can be imported."""
    return subprocess.run([sys.executable, "-W", "error", "-c", BLOCK + code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "module",
    [
        "flexcp",
        "flexcp.core",
        "flexcp.cost",
        "flexcp.planner",
        "flexcp.report.timeline",
        "flexcp.simulate",
        "flexcp.reproduce.main",
        "flexcp.cli",
    ],
)
def test_imports_without_torch(module):
    """The base install is enough to import the heart."""
    result = run(f"import {module}")

    assert result.stderr == ""


def test_import_is_light():
    """Importing the package does not drag in what only training needs, nor pydantic's machinery."""
    code = (
        "import flexcp, sys; print([m for m in ('torch', 'pydantic', 'rich', 'typer') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_plan_without_torch():
    """`flexcp plan` runs on a base install."""
    call = ["plan", str(LENGTHS), "--model", "qwen3-8b", "--hardware", "h100", "--ranks", "64", "--json"]
    result = run(f"from flexcp.cli import main; sys.exit(main({call!r}))")

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["inputs"]["global_batch"] == 512


def test_simulate_without_torch():
    """`flexcp simulate` runs on a base install, through more than one epoch."""
    call = ["simulate", str(LENGTHS), "--model", "qwen3-8b", "--ranks", "64", "--steps", "6", "--json"]
    result = run(f"from flexcp.cli import main; sys.exit(main({call!r}))")

    assert result.returncode == 0, result.stderr
    assert [step["step"] for step in json.loads(result.stdout)["steps"]] == list(range(6))


def test_report_without_torch(tmp_path):
    """`flexcp report` draws a plan and a run on a base install."""
    write_run(tmp_path / "run", BATCHES, Cluster(8, 2048, 4))
    out = tmp_path / "plan.json"
    plan = ["plan", str(LENGTHS), "--model", "qwen3-8b", "--ranks", "16", "--json", "--out", str(out)]
    calls = [plan, ["report", str(out)], ["report", str(tmp_path / "run")]]
    result = run(f"from flexcp.cli import main; sys.exit(max(main(call) for call in {calls!r}))")

    assert result.returncode == 0, result.stderr
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "run" / "report.html").exists()


def test_help_and_env_without_torch():
    """Verbs that need an extra are listed all the same, and `env` says what is missing."""
    result = run("from flexcp.cli import main; main(['--help']); main(['env', '--json'])")

    assert result.returncode == 0, result.stderr
    assert all(verb in result.stdout for verb in ("env", "lengths", "plan", "train"))
    assert '"accelerator": null' in result.stdout


def test_engine_without_torch_names_the_remedy():
    """The missing extra is an ImportError that is the command to run."""
    code = (
        "import flexcp\n"
        "try:\n    flexcp.Engine\n"
        "except ImportError as error:\n    print(type(error).__name__, error.remedy)"
    )

    assert run(code).stdout.strip() == "MissingExtraError pip install 'flexcp[train]'"


def test_megatron_without_its_extra_names_the_remedy():
    """Both extras are named, since one alone does not train."""
    code = (
        "import flexcp\n"
        "try:\n    flexcp.megatron\n"
        "except ImportError as error:\n    print(type(error).__name__, error.remedy)"
    )

    assert run(code).stdout.strip() == "MissingExtraError pip install 'flexcp[train,megatron]'"


def test_train_without_torch_names_the_remedy():
    """`flexcp train` on a base install ends with one line of cause and the pip command."""
    result = run("from flexcp.cli import main; sys.exit(main(['train', 'run.toml']))")

    assert result.returncode != 0
    assert "pip install 'flexcp[train]'" in result.stderr
    assert "Traceback" not in result.stderr
