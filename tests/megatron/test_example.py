"""The example is started by torchrun as a user would; the shim alone is put before it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "--hardware cpu --layers 2 --hidden 32 --max-tokens 1024 --tokens-per-rank 600 --global-batch 6"

if importlib.util.find_spec("megatron") is None:
    pytest.skip(
        "megatron-core is not installed: pip install 'flexcp[train,megatron]'", allow_module_level=True
    )


def torchrun(nproc: int, folder: Path, options: str) -> list[str]:
    """Lines that process 0 printed."""
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    script = ["tests/megatron/on_cpu.py", "examples/megatron_pretrain.py", "--folder", str(folder)]
    run = subprocess.run(
        [*launch, "--nproc-per-node", str(nproc), *script, *SMALL.split(), *options.split()],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [line for line in run.stdout.splitlines() if line.startswith(("step ", "after "))]


@pytest.mark.parametrize(
    ("nproc", "grid"),
    [(2, ""), pytest.param(4, "--tensor 2 --pipeline 2", marks=pytest.mark.slow)],
    ids=["data-parallel", "tensor-pipeline"],
)
def test_it_trains_and_goes_on_from_its_checkpoint(tmp_path: Path, nproc: int, grid: str) -> None:
    """Loss falls, evaluation runs, and a second start finds the first one's state."""
    first = torchrun(nproc, tmp_path, f"{grid} --steps 3")
    second = torchrun(nproc, tmp_path, f"{grid} --steps 5")

    numbers = [re.match(r"step +(\d+) +loss ([\d.]+) +packs: ", line) for line in first[:-1] + second[:-1]]
    assert [int(found[1]) for found in numbers if found] == [1, 2, 3, 4, 5]
    losses = [float(found[2]) for found in numbers if found]
    assert losses[-1] < losses[0]
    assert re.fullmatch(r"after 3 steps: held-out loss [\d.]+", first[-1])
    assert re.fullmatch(r"after 5 steps: held-out loss [\d.]+", second[-1])
