"""Whatever is wrong with a file, `flexcp report` draws it or says so in one line; it never falls over."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tests.run_folders import BATCHES, write_run

from flexcp.cli import main
from flexcp.core.cluster import Cluster
from flexcp.core.errors import FlexCPError
from flexcp.core.run_folder import trace_path
from flexcp.report.page.from_plan import subject_of_plan
from flexcp.report.page.from_run import subject_of_run
from flexcp.report.page.html import page
from flexcp.report.page.subject import Subject, plans_of
from flexcp.report.svg import plans_svg
from flexcp.report.timeline import plan_timeline

JUNK = [None, "x", "", -1, 0, 1e308, -1e308, 1e-300, 10**30, 0.5, True, [], {}, [1], {"a": 1}]
FILES = ["plan", "run", "metrics", "trace"]
QUIET = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder and a plan that are as they should be."""
    folder = tmp_path_factory.mktemp("whole")
    write_run(folder / "run", [batch[:7] for batch in BATCHES], Cluster(4, 4096, 4))
    (folder / "lengths.json").write_text(json.dumps(BATCHES[0]))
    options = ["--model", "qwen3-8b", "--ranks", "8", "--tokens-per-rank", "4096", "--json"]
    assert main(["plan", str(folder / "lengths.json"), *options, "--out", str(folder / "plan.json")]) == 0
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key and position inside of a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def damaged(text: str, draw: Callable[[Any], Any]) -> str:
    """The JSON with one part replaced by something else, or without it."""
    value = copy.deepcopy(json.loads(text))
    *way, last = draw(st.sampled_from(list(places(value))))
    inner = value
    for key in way:
        inner = inner[key]
    if draw(st.booleans()):
        inner[last] = draw(st.sampled_from(JUNK))
    else:
        del inner[last]
    return json.dumps(value)


def damage(path: Path, draw: Callable[[Any], Any]) -> None:
    """Damage a file, or one of its lines."""
    if path.suffix == ".json":
        path.write_text(damaged(path.read_text(), draw))
        return
    lines = path.read_text().splitlines()
    index = draw(st.integers(0, len(lines) - 1))
    lines[index] = damaged(lines[index], draw)
    path.write_text("\n".join(lines) + "\n")


def shown(subject: Subject) -> str:
    """All that the command makes of it."""
    plans = plans_of(subject, None)
    if plans:
        plans_svg(plans)
        for plan in plans:
            plan_timeline(plan)
    return page(subject)


@QUIET
@given(data=st.data())
def test_damage_is_drawn_or_named(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """One value of one file is something else or missing."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole / "run", folder)
    shutil.copy(whole / "plan.json", tmp_path)
    kind = data.draw(st.sampled_from(FILES))
    path = {
        "plan": tmp_path / "plan.json",
        "run": folder / "run.json",
        "metrics": folder / "metrics.jsonl",
        "trace": trace_path(folder, 0, data.draw(st.integers(0, 3))),
    }[kind]
    damage(path, data.draw)
    named = None
    try:
        text = shown(subject_of_plan(path) if kind == "plan" else subject_of_run(folder))
    except FlexCPError as error:
        named = error
    event(f"{kind} {'named' if named else 'drawn'}")

    assert (named.cause and named.remedy) if named else text.endswith("</html>\n")
    assert named or not re.search(r'"(nan|inf)|(nan|inf) (s|ms)\b', text)
