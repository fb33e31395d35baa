"""The page in a real browser without display: everything drawn, themes and keys work, nothing fetched.

Skipped, with its reason, where there is no Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.run_folders import BATCHES, write_run

from flexcp.cli import main
from flexcp.core.cluster import Cluster
from flexcp.report.page.from_plan import subject_of_plan
from flexcp.report.page.from_run import subject_of_run
from flexcp.report.page.html import page
from flexcp.report.page.subject import Subject
from flexcp.report.tables import rank_runs

LENGTHS = Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions"),
    *("--no-default-browser-check", "--disable-dev-shm-usage", "--virtual-time-budget=3000"),
)

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=f"no browser: none of {', '.join(BROWSERS)} is installed"),
    pytest.mark.timeout(120),
]

# Counts, per section, the shapes that have an area or a length on the screen. Steps are shown in turn.
PROBE = """
const drawn = (where, what) => [...where.querySelectorAll(what)].filter((shape) => {
  const box = shape.getBoundingClientRect();
  return box.width > 0 && box.height > 0 || shape.matches("path") && box.width > 0;
}).length;
const found = { sections: {}, steps: {}, ground: {} };
for (const section of document.querySelectorAll("section")) {
  const counts = found.sections[section.id] = { text: drawn(section, "svg text") };
  for (const name of ["bar", "line", "spot", "stop"]) counts[name] = drawn(section, `.plot .${name}`);
}
const select = document.getElementById("step");
for (const option of select.options) {
  select.value = option.value;
  select.dispatchEvent(new Event("change"));
  found.steps[option.value] = drawn(document.getElementById("timeline"), ".task rect");
}
const colour = () => getComputedStyle(document.body).backgroundColor;
const theme = document.getElementById("theme");
found.ground.first = colour(); theme.click(); found.ground.second = colour(); theme.click();
found.ground.third = colour();
const press = (key) =>
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const tip = document.getElementById("tip");
const stops = [...document.querySelectorAll("#lengths .stop")];
stops[0].focus(); press("ArrowRight"); found.right = stops.indexOf(document.activeElement);
found.tip = [tip.hidden, tip.textContent, document.activeElement.getAttribute("aria-label")];
press("End"); found.end = stops.indexOf(document.activeElement) - stops.length;
press("Escape"); found.escaped = tip.hidden;
found.order = document.querySelectorAll("#lengths [tabindex='0']").length;
const shown = document.querySelector(".step:not([hidden])");
const width = () => shown.querySelector(".gantt").getBoundingClientRect().width;
const before = width(); document.getElementById("in").click(); found.zoom = width() / before;
shown.querySelector(".task").focus(); found.same = shown.querySelectorAll(".same").length;
found.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
const out = document.createElement("output"); out.id = "probe"; out.textContent = JSON.stringify(found);
document.body.append(out);
"""


def browse(html: str, folder: Path, *options: str) -> str:
    """The document as it stands when all scripts have run."""
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        command = [BROWSER, *QUIET, f"--user-data-dir={profile}", *options, "--dump-dom", path.as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.stdout.rstrip().endswith("</html>"), result.stderr[-2000:]
    return result.stdout


def probed(subject: Subject, folder: Path, *options: str) -> dict[str, Any]:
    """What the probe finds; it may run only because the page's own policy is taken off."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(subject))
    dom = browse(html.replace("</body>", f"<script>{{ {PROBE} }}</script></body>"), folder, *options)
    answer = re.search(r'<output id="probe">(.*?)</output>', dom, flags=re.S)
    assert answer, "the probe did not run to its end"
    found: dict[str, Any] = json.loads(unescape(answer[1]))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Two steps on 8 ranks."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, BATCHES[:2], Cluster(8, 2048, 4), slower=1.1)
    return subject_of_run(folder)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Two steps of real lengths on 16 ranks."""
    out = tmp_path_factory.mktemp("plan") / "plan.json"
    options = ["--model", "qwen3-8b", "--ranks", "16", "--tokens-per-rank", "16384", "--global-batch", "64"]
    assert main(["plan", str(LENGTHS), *options, "--steps", "2", "--json", "--out", str(out)]) == 0
    return subject_of_plan(out)


def test_the_plots_of_a_run_draw(run: Subject, tmp_path: Path) -> None:
    """As many shapes on the screen as there are numbers; measured boxes are one a rank."""
    found = probed(run, tmp_path)
    sections = found["sections"]

    assert sections["steps"]["line"] == 4
    assert sections["gap"]["line"] == 3
    assert sections["steps"]["stop"] == sections["gap"]["stop"] == 2
    assert sections["prediction"]["spot"] == len(run.pairs) > 10
    assert sections["policies"]["bar"] == sum(not row.refusal for row in run.policies)
    assert sections["lengths"]["bar"] == sum(share > 0 for share in run.lengths.samples + run.lengths.tokens)
    assert sections["degrees"]["bar"] == 2 * len(run.degrees)
    assert sections["memory"]["bar"] == 8
    assert all(sections[name]["text"] >= 5 for name in ("timeline", "steps", "gap", "lengths", "memory"))
    for timeline in run.timelines:
        predicted, measured = timeline.panels
        above = sum(len(rank_runs(box.ranks)) for box in predicted.boxes)  # neighbours are one rectangle
        below = sum(len(box.by_rank) for box in measured.boxes)
        assert found["steps"][str(timeline.step)] == above + below


def test_the_plots_of_a_plan_draw(plan: Subject, tmp_path: Path) -> None:
    """Both policies of the timeline, and a bar for each policy that serves."""
    found = probed(plan, tmp_path)
    sections = found["sections"]

    assert sections["steps"]["line"] == 3
    assert sections["policies"]["bar"] == sum(not row.refusal for row in plan.policies) >= 4
    assert sections["memory"]["bar"] == 16
    assert sections["lengths"]["bar"] == sum(n > 0 for n in plan.lengths.samples + plan.lengths.tokens)
    for timeline in plan.timelines:
        assert found["steps"][str(timeline.step)] >= sum(len(panel.boxes) for panel in timeline.panels)


def test_themes_and_keys(run: Subject, tmp_path: Path) -> None:
    """The page follows the system and the button; arrows walk through a plot; zoom widens the timeline."""
    found = probed(run, tmp_path)

    assert found["ground"]["first"] != found["ground"]["second"]
    assert found["ground"]["third"] == found["ground"]["first"]
    assert found["right"] == 1
    hidden, shown, described = found["tip"]
    assert not hidden
    assert shown == described
    assert "samples" in shown
    assert found["end"] == -1
    assert found["escaped"]
    assert found["order"] == 1
    assert found["zoom"] == pytest.approx(2.0)
    assert found["same"] == 2


def test_dark_is_the_system_s_choice(run: Subject, tmp_path: Path) -> None:
    """Without a click, the ground is dark where the system says so."""
    light = probed(run, tmp_path, "--blink-settings=preferredColorScheme=1")["ground"]
    dark = probed(run, tmp_path, "--blink-settings=preferredColorScheme=0")["ground"]

    assert light["first"] == dark["second"] == "rgb(245, 246, 248)"
    assert dark["first"] == light["second"] == "rgb(13, 17, 23)"


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy that writes down what it is asked for and answers nothing."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    line = connection.recv(2000).decode(errors="replace").split("\r\n")[0]
                    # Chromium talks to its maker whatever it shows.
                    if not re.search(r"google(apis)?\.com|gvt1\.com", line):
                        asked.append(line)

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"--proxy-server=127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)


def test_nothing_is_fetched(run: Subject, plan: Subject, proxy: Any, tmp_path: Path) -> None:
    """No request leaves the browser, also where a name got past the escaping; without the policy one does."""
    option, asked = proxy
    for subject in (run, plan):
        assert 'id="timeline"' in browse(page(subject), tmp_path, option)
        assert probed(subject, tmp_path, option)["fetched"] == []
    leak = '<img src="http://tracker.example/x.png"></body>'
    browse(page(run).replace("</body>", leak), tmp_path, option)
    assert asked == []

    unguarded = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(run))
    browse(unguarded.replace("</body>", leak), tmp_path, option)
    assert asked
    assert all("tracker.example" in request for request in asked)


def test_hostile_names_do_not_run(tmp_path: Path) -> None:
    """A model called like a script is shown and not run, even with the page's policy taken off."""
    hostile = '<script>document.title = "owned"</script><img src=x onerror="document.title = \'owned\'">'
    write_run(tmp_path / "run", [[900, 40]], Cluster(2, 2048), model=hostile)
    html = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(subject_of_run(tmp_path / "run"))
    )
    dom = browse(html, tmp_path)

    assert "<title>run – FlexCP</title>" in dom
    assert "&lt;script&gt;document.title" in dom
