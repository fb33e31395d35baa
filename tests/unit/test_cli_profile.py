"""`flexcp profile --import`: times that others measured, as a user meets them."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.test_calibration import SETUP, tasks
from tests.unit.test_cli import flat

from flexcp.cli import main
from flexcp.cli.outputs import require_writable, write_output
from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import Sample
from flexcp.cost import Load, cost_model, hardware
from flexcp.cost.calibration import fit_calibration, read_calibration
from flexcp.cost.measurements import COLUMNS, read_measurements
from flexcp.cost.profiled import Profiled

PACKS = Path(__file__).parents[1] / "data" / "distca_attn_every_8th_pack.psv"


def test_task_times_of_others_become_a_calibration(tmp_path, capfd):
    """From a CSV of tasks to a file that a plan takes."""
    cost = cost_model(model_shape("qwen3-8b"), hardware("h100"))
    lines = [",".join(COLUMNS)]
    for tokens, samples, degree in itertools.product((512, 4096, 32_768), (1, 4), (1, 2, 4)):
        load = sum([Load.of(Sample(0, tokens // samples), 0)] * samples, Load())
        lines.append(",".join(map(str, (*load.counts, degree, cost.task_s(load, degree)))))
    table, out = tmp_path / "tasks.csv", tmp_path / "calibration.json"
    table.write_text("\n".join(lines))

    given = ["profile", "--import", str(table), "--out", str(out)]
    assert main([*given, "--model", "qwen3-8b"]) == 0, capfd.readouterr()
    assert read_calibration(out).cost.pair_s == pytest.approx(cost.pair_s, rel=1e-3)
    assert read_calibration(out).setup.device == "h100"
    assert read_calibration(out).setup.checkpointing
    assert main([*given, "--model", "qwen3-8b", "--no-checkpointing"]) == 0
    assert not read_calibration(out).setup.checkpointing
    assert main(given) == 2
    assert "--model is missing" in flat(capfd.readouterr().err)
    table.write_text("\n".join([*lines[:5], lines[5].rsplit(",", 1)[0] + ",-1", *lines[6:]]))
    assert main([*given, "--model", "qwen3-8b"]) == 2
    assert "tasks.csv, row 5: a time of -1.0 s" in flat(capfd.readouterr().err)


def test_attention_times_of_others_are_judged(capfd):
    """The table tells how well packs are predicted that were left out; no calibration is written."""
    assert main(["profile", "--import", str(PACKS)]) == 0
    out = flat(capfd.readouterr().out)
    assert re.search(r"the other 11 are predicted within [12]\.\d% on average", out), out
    assert "176 times, seed 0" in out
    assert main(["profile", "--import", str(PACKS), "--out", "c.json"]) == 2
    assert "make no calibration" in flat(capfd.readouterr().err)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--out", "c.json", "--model", "qwen3-8b"], "--model says nothing here: nothing is imported"),
        (["--out", "c.json", "--hardware", "a100"], "--hardware says nothing here: nothing is imported"),
        (["--out", "c.json", "--checkpointing"], "--checkpointing says nothing here"),
        (["--import", str(PACKS), "--nproc", "2"], "--nproc says nothing here: "),
        (["--import", str(PACKS), "--seconds", "9"], "nothing is measured"),
        (["--import", str(PACKS), "--model", "qwen3-8b"], "--model says nothing here: attention times alone"),
        (["--import", str(PACKS), "--json"], "--json says nothing here"),
        (["--out", "c.json", "--rows", "rows.txt"], "--rows rows.txt is not a .csv file"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(tmp_path, monkeypatch, capfd, options, cause):
    """Or the user believes that a100 was measured."""
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *options]) == 2
    assert cause in flat(capfd.readouterr().err)


def test_measured_tasks_can_be_kept_and_read_again(tmp_path):
    """The fit of the table is the fit of the measurement."""
    found = Profiled.of(tasks(noise=0.03), SETUP)
    path = tmp_path / "tasks.csv"
    path.write_text(found.to_csv())
    assert Profiled.of(read_measurements(path), SETUP) == found
    [(task, error), *_] = found.worst(3)
    assert error == pytest.approx(found.calibration.cost.task_s(task.load, task.degree) / task.seconds - 1)
    assert all(abs(error) >= abs(other) for _, other in found.worst(48))


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_plan_follows_how_the_calibration_was_measured(tmp_path, capfd, recomputed):
    """Training recomputes layers only where it is told to, and so does what was profiled with its config."""
    path, lengths = tmp_path / "c.json", tmp_path / "lengths.json"
    path.write_text(fit_calibration(tasks(), replace(SETUP, checkpointing=recomputed)).to_json())
    lengths.write_text("[100, 200, 900]")
    plan = ["plan", str(lengths), "--model", "qwen3-8b", "--ranks", "2", "--hardware", str(path), "--json"]
    plan += ["--tokens-per-rank", "4096"]
    doubt = f"measured with{'' if recomputed else 'out'} recomputation"
    shown = []
    for option in ([], ["--checkpointing"], ["--no-checkpointing"]):
        assert main([*plan, *option]) == 0
        shown.append(json.loads(capfd.readouterr().out))
    same, other = (1, 2) if recomputed else (2, 1)
    assert shown[0]["inputs"]["checkpointing"] is recomputed
    assert all(shown[0][part] == shown[same][part] for part in ("inputs", "coefficients"))
    assert not any(doubt in notice for notice in shown[0]["inputs"]["notices"])
    assert any(doubt in notice for notice in shown[other]["inputs"]["notices"])
    assert shown[1]["coefficients"]["token_s"] > 1.2 * shown[2]["coefficients"]["token_s"]


def test_a_foreign_table_is_named_before_out_is_asked_for(tmp_path, capfd):
    """Its missing columns are what to mend first."""
    (tmp_path / "other.csv").write_text("when,ms\n1,2\n")
    assert main(["profile", "--import", str(tmp_path / "other.csv")]) == 2
    assert "has no column 'tokens', 'pairs'" in flat(capfd.readouterr().err)


@pytest.mark.parametrize(
    "call",
    [
        ["reproduce", "main", "--out", "{}"],
        ["profile", "--out", "{}"],
        ["plan", "no-such-lengths.json", "--model", "qwen3-8b", "--ranks", "8", "--out", "{}"],
        ["lengths", "no-such-lengths.json", "--out", "{}"],
        ["report", str(PACKS), "--out", "{}"],
    ],
)
def test_a_file_that_cannot_be_written_is_named_before_the_work(tmp_path, capfd, call):
    """A folder, a missing folder, a file system that takes no files; what may be written stays untouched."""
    (tmp_path / "folder.json").mkdir()
    for name, cause in [
        (f"{tmp_path}/folder.json", "folder.json is a folder"),
        (f"{tmp_path}/no/such.json", "does not exist"),
        ("/proc/x.json", "/proc/x.json cannot be written"),
    ]:
        assert main([part.format(name) for part in call]) == 2
        shown = flat(capfd.readouterr().err)
        assert cause in shown
        assert "fix: " in shown
    kept = tmp_path / "kept.json"
    kept.write_text("as it was")
    require_writable(kept)
    require_writable(tmp_path / "new.json")
    assert kept.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "kept.json"]


def test_a_write_that_fails_is_named(tmp_path):
    """A disk may fill up while the work goes on."""
    with pytest.raises(ConfigError, match=r"/dev/full cannot be written \(No space left"):
        write_output(Path("/dev/full"), "text")
