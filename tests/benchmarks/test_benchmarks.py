"""The short form of each measuring script: it runs, and its page has its parts. How fast is not asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.run_folders import BATCHES, COST

from flexcp.core.cluster import Cluster
from flexcp.core.run_folder import RunInfo
from flexcp.core.sample import samples_from_lengths
from flexcp.planner import make_plan
from flexcp.simulate import Conditions, simulate
from flexcp.simulate.folder import SimulatedFolder

ROOT = Path(__file__).parents[2]
HEAD = ["--short", "seed 0", "flexcp", "torch", "numpy", "Python", "cores", "load average"]
# Script -> what its page says, and the first cells of the rows of its tables.
PAGES = {
    "emulated": (
        ["**This is an emulation.**", "2 ranks"],
        [(mode, policy) for mode in ("free-running", "lockstep") for policy in ("flexcp", "paper", "static")],
    ),
    "replay": (
        ["Messages cost nothing"],
        [(mode, policy) for mode in ("free-running", "lockstep") for policy in ("flexcp", "paper", "static")],
    ),
    "real": (["mix of 300, 6,000 and 50,000 tokens"], [("flexcp",), ("static",)]),
    "megatron": (["`BalancedCPScheduler` unchanged"], [("python_source_lengths_qwen", "64", "8192")]),
    "feed": (["512 samples on 64 simulated ranks"], [("in a process",), ("in a thread",)]),
    "calibration": (["Cross-validated: ", "never fitted, degree"], [("all",), ("one sample",)]),
    "overhead": (["Engine on one rank", "Ring of two"], [("wall-clock",), ("processor",)]),
}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=() if script in ("emulated", "feed") else pytest.mark.slow)
        for script in PAGES
    ],
)
def test_short_form_runs_and_its_page_has_its_parts(script: str, tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    page = run_script(script, "--short", "--out", str(out))
    said, rows = PAGES[script]
    head = page.partition("\n\n**")[0] if script == "emulated" else page
    assert [part for part in HEAD if part not in head] == []
    assert [part for part in said if part not in page] == []
    for cells in rows:
        row = re.search(r"^\| " + r" \| ".join(map(re.escape, cells)) + r"[^\n]*\|$", page, flags=re.M)
        assert row is not None, cells
        assert re.search(r"\| [+-]?\d+\.\d+%? \|", row[0]), row[0]


def test_the_simulator_is_timed(tmp_path: Path) -> None:
    """Its short form: the smallest step, alone and with shared links."""
    page = run_script("simulator", "--short", "--out", str(tmp_path / "page.md"))
    rows = re.findall(r"^\| 512 \| 64 \| \d+ \| ([^|]+) \| (\d+\.\d) \| \d+ \|$", page, flags=re.M)

    assert all(part in page for part in HEAD)
    assert [day for day, _ in rows] == ["alone", "jitter, 4 uplinks a node"]


def test_planning_is_timed(tmp_path: Path) -> None:
    """Its short form has a row of every table, and its summary counts them."""
    page = run_script("planner", "--short", "--out", str(tmp_path / "page.md"))
    rows = re.findall(r"^\| python_source_lengths_qwen \| 16384 \| (\d+) \|", page, flags=re.M)

    assert "`python benchmarks/planner.py --short`, seed 0" in page
    assert re.search(r"^\| python_source_lengths_qwen \| 512 × 64 \| \d+\.\d \| 1\.\d+ \|$", page, flags=re.M)
    assert rows == ["32", "64", "128", *["24", "32"] * 2]
    assert re.search(r"^\| lockstep, all \| 2 \|", page, flags=re.M)


def test_a_run_beside_its_simulation(tmp_path: Path) -> None:
    """A run whose ranks shared the cores as the simulator has it: costs found in it give its times again."""
    cluster, cores = Cluster(4, 4096, 4), len(os.sched_getaffinity(0))
    plans = [
        make_plan(samples_from_lengths([length + 37 * step for length in batch]), cluster, COST)
        for step, batch in enumerate(BATCHES * 2)
    ]
    whole = plans[0].whole_below_tokens
    info = RunInfo("simulated", "tiny", "cpu", "flexcp", "free-running", cluster, whole, asdict(COST))
    with SimulatedFolder(tmp_path / "run", info) as folder:
        for step in simulate(plans, COST, Conditions(cores=cores), folder.record):
            folder.step(step.report)
    run, none = str(tmp_path / "run"), str(tmp_path / "no-calibration.json")
    page = run_script("simulated_demo", "--run", run, "--calibration", none, "--out", str(tmp_path / "p.md"))
    rows = {
        row[0]: row[1:] for row in re.findall(r"^\| (in-run, \w+|plan) \| (\d+) \| (\S+)%", page, flags=re.M)
    }

    assert {name: int(steps) for name, (steps, _) in rows.items()} == {
        "in-run, even": 3,
        "in-run, odd": 3,
        "plan": 6,
    }
    assert all(abs(float(rows[name][1])) < 1.0 for name in ("in-run, even", "in-run, odd"))


def run_script(script: str, *arguments: str) -> str:
    """Run it; what it wrote to the file named last."""
    command = [sys.executable, f"benchmarks/{script}.py", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return Path(arguments[-1]).read_text(encoding="utf-8")
