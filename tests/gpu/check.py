"""The sections of the check in order, within a time, and one short table last. See check.sh."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tests.gpu.common import Place, Row, attempt, release, too_late
from tests.gpu.kernels import check_kernels
from tests.gpu.profile import check_memory, check_profile, check_waits
from tests.gpu.ranks import check_ranks
from tests.gpu.ring import check_ring

SECTIONS = ("kernels", "ranks", "ring", "waits", "profile", "memory")
_LIMIT_S = 450.0  # nothing begins later, and ranks started before are ended
_MARKS = {True: "ok", False: "FAILED", None: "-"}


def main(arguments: list[str]) -> int:
    """0 if all that is judged passed."""
    options = _options(arguments)
    device = _device(options.device)
    place = Place(device, options.quick, time.monotonic() + _LIMIT_S)
    if place.is_cpu:
        torch.set_num_threads(1)  # more would wait for each other on a busy machine
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "check.log"
    log.write_text("", encoding="utf-8")
    say = _Log(log)

    def profile() -> list[Row]:
        rows, found = check_profile(place)
        (options.out / "calibration.json").write_text(found.calibration.to_json(), encoding="utf-8")
        (options.out / "tasks.csv").write_text(found.to_csv(), encoding="utf-8")
        return rows

    sections: dict[str, Callable[[], Iterable[Row]]] = {
        "kernels": lambda: check_kernels(place),
        "ranks": lambda: check_ranks(place),
        "ring": lambda: check_ring(place),
        "waits": lambda: check_waits(place),
        "profile": profile,
        "memory": lambda: check_memory(place),
    }
    rows = _run({name: sections[name] for name in options.only or SECTIONS}, place, say)
    say(_table(rows, device, options.out))
    return 1 if any(row.ok is False for row in rows) else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/check.sh", description=__doc__)
    parser.add_argument("--device", default="accelerator", help="accelerator, or cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes: does the script itself work")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder for what is written")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, help="sections; all of them if none is named")
    return parser.parse_args(arguments)


def _device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        sys.exit("no accelerator here; --device cpu --quick shows that the script works")
    return torch.device(found.type, 0)


class _Log:
    """To the terminal, and to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begun_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._begun_s

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def _run(sections: dict[str, Callable[[], Iterable[Row]]], place: Place, say: _Log) -> list[Row]:
    """All of them, whatever one of them raises; a row is in the log as soon as it is known."""
    rows: list[Row] = []
    for name, section in sections.items():
        if not place.left_s:
            rows.append(too_late(name))
            continue
        say(f"[{say.spent_s:5.0f} s] {name}")

        def told(section: Callable[[], Iterable[Row]] = section) -> Iterable[Row]:
            for row in section():
                _tell(row, say)
                rows.append(row)
            return ()

        for row in attempt(name, told):
            _tell(row, say)
            rows.append(row)
        release(place.device)
    return rows


def _tell(row: Row, say: _Log) -> None:
    say(f"{row.trace}          {_MARKS[row.ok]:6}  {row.name}: {row.value}")


def _table(rows: list[Row], device: torch.device, out: Path) -> str:
    name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    width = max(len(row.name) for row in rows)
    lines = [f"{row.name:{width}}  {_MARKS[row.ok]:6}  {row.value}" for row in rows]
    failed = sum(row.ok is False for row in rows)
    head = f"\n{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; written to {out}"
    return "\n".join([head, *lines, f"{failed} failed" if failed else "all that is judged passed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
