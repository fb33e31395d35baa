"""Runs a script for GPUs on the CPU: `torchrun … tests/megatron/on_cpu.py SCRIPT ARGUMENTS`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.megatron import shim

if __name__ == "__main__":
    shim.install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
