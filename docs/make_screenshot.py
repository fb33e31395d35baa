"""Takes the picture of docs/report.md in a browser without display: python docs/make_screenshot.py."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIMULATE = (
    *("simulate", "tests/data/python_source_lengths_qwen.json", "--model", "qwen3-8b", "--ranks", "64"),
    *("--tokens-per-rank", "8192", "--steps", "40", "--jitter", "0.05", "--slow-rank", "13=0.7"),
)
BROWSER = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def main() -> None:
    """A simulated run with one slow rank, reported and photographed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "slow-rank"
        for call in ((*SIMULATE, "--out", str(run)), ("report", str(run), "--step", "6")):
            subprocess.run([sys.executable, "-m", "flexcp", *call], cwd=ROOT, check=True, capture_output=True)
        picture = f"--screenshot={ROOT / 'docs' / 'report.png'}"
        size, wait = "--window-size=1180,1240", "--virtual-time-budget=2000"
        page = (run / "report.html").as_uri()
        subprocess.run([*BROWSER, size, wait, picture, page], check=True, capture_output=True)


if __name__ == "__main__":
    main()
