"""`flexcp lengths`: numbers, the file it writes, and what it says."""

import json
import struct

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from flexcp.cli.lengths import lengths, summarize
from flexcp.core.errors import ConfigError, DataError, LengthsError
from flexcp.core.lengths import read_lengths
from flexcp.train.data import train_bpe

app = typer.Typer()
app.command()(lengths)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for i, tokens in enumerate([10, 100, 1000]):
        (data / f"{i}.py").write_text("x" * (tokens - 1))
    (data / "empty.py").write_text("")
    return data


def test_summary_in_numbers():
    found = summarize(np.array([1, 2, 3, 8192, 8193, 40_000, 140_000]))
    assert found["count"] == 7
    assert found["total"] == 196_391
    assert (found["p50"], found["max"]) == (8192, 140_000)
    shares = {limit: share * found["total"] for limit, share in found["long_share"].items()}
    assert shares == pytest.approx({"8192": 188_193, "32768": 180_000, "131072": 140_000})
    assert found["histogram"][0] == [1, 2, 1, 1]
    assert found["histogram"][1] == [2, 4, 2, 5]
    assert sum(samples for _, _, samples, _ in found["histogram"]) == 7
    assert sum(tokens for *_, tokens in found["histogram"]) == 196_391


def test_a_folder_becomes_a_length_file(folder, tmp_path):
    result = run(folder, "--pattern", "*.py", "--out", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert read_lengths(tmp_path / "out.json").tolist() == [10, 100, 1000]
    assert "1,110" in result.stdout
    assert "512 – 1k" in result.stdout
    assert "1 skipped, empty: empty.py" in result.stdout
    assert f"lengths written to {tmp_path / 'out.json'}" in result.stdout.replace("\n", "")
    assert sorted(entry.name for entry in folder.iterdir()) == ["0.py", "1.py", "2.py", "empty.py"]


def test_json_is_one_object(folder):
    result = run(folder, "--json")
    found = json.loads(result.stdout)
    assert found["schema"] == "flexcp.lengths/1"
    assert found["total"] == 1110
    assert found["skipped"] == [{"reason": "empty", "count": 1, "first": ["empty.py"]}]


def test_several_paths_are_joined_in_order(folder, tmp_path):
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 1) + struct.pack("<iqq", 77, 0, 0)
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "b.json").write_text("[5]")
    result = run(tmp_path / "b.json", folder, tmp_path / "a.idx", "--out", tmp_path / "out.txt")
    assert result.exit_code == 0, result.output
    assert read_lengths(tmp_path / "out.txt").tolist() == [5, 10, 100, 1000, 77]


def test_a_column_makes_any_file_a_length_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 7, "m": 1}\n{"n": 9, "m": 1}\n')
    assert json.loads(run(tmp_path / "a.jsonl", "--column", "n", "--json").stdout)["total"] == 16


def test_text_column_and_tokenizer(tmp_path):
    train_bpe(["hello hello"], 262, tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n')
    result = run(tmp_path / "a.jsonl", "--text-column", "body", "--tokenizer", tmp_path, "--json")
    assert json.loads(result.stdout)["total"] < len("hello") + 1


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            ["l.json", "--tokenizer", "bytes"],
            ConfigError,
            "--tokenizer would change nothing: every path holds",
        ),
        (["l.csv"], LengthsError, "which column holds the lengths? There are: a, b"),
        (["none"], DataError, "none does not exist"),
        (["e.txt"], DataError, "e.txt gives no sample\n1 skipped, empty: e.txt"),
        (["l.json", "--out", "x.npz"], LengthsError, "no length file ends in '.npz'"),
    ],
)
def test_errors_reach_the_caller(tmp_path, monkeypatch, arguments, kind, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l.json").write_text("[5]")
    (tmp_path / "l.csv").write_text("a,b\n1,2\n")
    (tmp_path / "e.txt").write_text("")
    error = run(*arguments).exception
    assert isinstance(error, kind)
    assert text in str(error)
