"""The check of an accelerator: on a CPU that its script works, on an accelerator what no CPU can say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexcp.attention.kernels import CpuKernel
from flexcp.cost.calibration import read_calibration
from flexcp.cost.measurements import read_measurements

SCRIPT = Path(__file__).parent / "check.sh"


NO_PYDANTIC = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pydantic":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""


def test_the_script_works_on_a_cpu(tmp_path: Path) -> None:
    """Every section, small, where nothing was installed for it; what it writes can be read."""
    (tmp_path / "sitecustomize.py").write_text(NO_PYDANTIC)
    command = ["bash", str(SCRIPT), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHON": sys.executable}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[-1] == "all that is judged passed"
    table = "\n".join(lines[lines.index(next(line for line in lines if line.startswith("cpu, torch"))) :])
    for row in ("operators of flash", "cpu fp32", "gradients, 3 ranks", "ring of 2-3", "merge", "unseen"):
        assert row in table
    for work in ("a ring of 4", "a micro-batch"):
        [row] = [
            line for line in table.splitlines() if line.startswith(f"host waits in {work}, without NCCL")
        ]
        assert row.split()[-2:] == ["ok", "none"]
    assert (tmp_path / "check.log").read_text().strip().endswith("all that is judged passed")
    calibration = read_calibration(tmp_path / "calibration.json")
    assert calibration.setup.link is None
    assert len(read_measurements(tmp_path / "tasks.csv")) >= calibration.measurements


def test_a_section_that_fails_is_a_row_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run all the same."""
    from tests.gpu import check
    from tests.gpu.common import Row, judged

    def broken(place: object) -> list[Row]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(check, "check_kernels", broken)
    monkeypatch.setattr(check, "check_ring", lambda place: [judged("error", float("nan"), 1.0)])
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--only", "kernels", "ring"]
    assert check.main(arguments) == 1
    log = (tmp_path / "check.log").read_text()
    assert "kernels  FAILED  RuntimeError: no such kernel" in log
    assert "error    FAILED  nan" in log
    assert log.strip().endswith("2 failed")


def test_what_was_found_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table and, with the trace, in the log; of kernels, entry by entry."""
    from tests.gpu import check, kernels
    from tests.gpu.common import Row

    class Broken(CpuKernel):
        def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
            raise RuntimeError("an illegal memory access")

    def half(place: object) -> Any:
        yield Row("the first half", "1.0", ok=True)
        raise RuntimeError("and no more")

    entries = [("first", CpuKernel()), ("broken", Broken()), ("last", CpuKernel())]
    widths = (torch.float32, (16,))
    monkeypatch.setattr(kernels, "entries", lambda place: iter([(*entry, *widths) for entry in entries]))
    monkeypatch.setattr(check, "check_ring", half)
    arguments = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--only", "kernels", "ring"]
    assert check.main(arguments) == 1
    log = (tmp_path / "check.log").read_text()
    table = log[log.rindex("cpu, torch") :]
    for name, mark in (
        ("first x 16", "ok"),
        ("broken", "FAILED"),
        ("last x 16", "ok"),
        ("the first half", "ok"),
    ):
        [line] = [line for line in table.splitlines() if line.startswith(f"{name} ")]
        assert f"  {mark} " in line
    assert log.endswith("2 failed\n")
    assert log.count("Traceback") == 2
    assert log.index("the first half: 1.0") < log.index("and no more")


def test_a_kernel_that_is_a_little_wrong_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row an entry, with its worst error."""
    from tests.gpu import kernels
    from tests.gpu.common import Place

    class Off(CpuKernel):
        def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = super().backward(*args)
            return dq, dk * (1 + 1e-4), dv

    entries = [("right", CpuKernel(), torch.float32, (16,)), ("off", Off(), torch.float32, (16,))]
    monkeypatch.setattr(kernels, "entries", lambda place: iter(entries))
    rows = list(kernels.check_kernels(Place(torch.device("cpu"), quick=True)))
    assert [row.ok for row in rows] == [True, True, True, False]
    assert rows[-1].value.startswith("1.0e-04")


def test_there_is_one_deadline_for_all_sections() -> None:
    """What is late is a failed row, inside of sections too; ranks get no more than what is left."""
    import time

    from tests.gpu import kernels, ring
    from tests.gpu.common import Place

    late = Place(torch.device("cpu"), quick=True, ends_s=0.0)
    for rows in (list(kernels.check_kernels(late))[2:], list(ring.check_ring(late))):
        assert rows
        assert all(row.value == "not begun: the time is up" and row.ok is False for row in rows)
    assert late.within(100.0) == 1.0
    assert 5.0 < Place(torch.device("cpu"), True, time.monotonic() + 20.0).within(100.0) <= 20.0
    assert Place(torch.device("cpu"), quick=True).within(100.0) == 100.0


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads"), [(8, 8), (64, 64), (65, 4), (1, 8)])
def test_log_sum_exps_of_flash_are_heads_first(rows: int, heads: int) -> None:
    """Pinned where shapes cannot tell: as many rows as heads."""
    from flexcp.attention.kernels import FlashKernel
    from tests.gpu.common import Place
    from tests.gpu.kernels import BANDS, _lse_error

    place = Place(torch.device("cuda", 0), quick=True)
    for dtype in (torch.bfloat16, torch.float16):
        assert _lse_error(place, FlashKernel(), dtype, 64, rows, heads) <= BANDS[dtype]
