"""`flexcp profile --import`: times that others measured, as a user meets them."""

import itertools
import re
from pathlib import Path

import pytest
from tests.unit.test_cli import flat

from flexcp.cli import main
from flexcp.cli.outputs import require_writable, write_output
from flexcp.core.errors import ConfigError
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import Sample
from flexcp.cost import Load, cost_model, hardware
from flexcp.cost.calibration import read_calibration
from flexcp.cost.measurements import COLUMNS

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
