"""Length files: every form in, every fault named with its file and line."""

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.core.errors import LengthsError
from flexcp.core.lengths import read_lengths, read_samples, write_lengths
from flexcp.core.sample import Sample

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
WHOLE = "Lengths are whole numbers of tokens, at least 1."


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def idx(lengths, *, version=1, code=8, modes=False, magic=b"MMIDIDX\x00\x00"):
    n = len(lengths)
    body = struct.pack("<9sQBQQ", magic, version, code, n, n + 1)
    body += np.array(lengths, "<i4").tobytes() + np.zeros(n, "<i8").tobytes()
    return body + np.arange(n + 1, dtype="<i8").tobytes() + (bytes(n) if modes else b"")


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.json", "[5, 1, 131073]", None),
        ("a.json", '[{"tokens": 5}, 1, {"tokens": 131073.0, "spans": []}]', None),
        ("a.json", '[{"n": 5}, {"n": 1}, {"n": 131073}]', None),
        ("a.json", '[{"n": 5, "m": 0}, {"n": 1, "m": 0}, {"n": 131073, "m": 0}]', "n"),
        ("a.jsonl", "5\n\n1\n131073\n", None),
        ("a.jsonl", '{"id": "x", "length": 5}\n{"length": 1}\r\n{"length": 131073}', None),
        ("a.csv", "id,tokens\nx,5\ny,1\nz,131073\n", None),
        ("a.csv", 'id, n \n"x\ny",5\n\nz,1\nz,131073\n', "n"),
        ("a.tsv", "id\ttokens\nx\t5\ny\t1\nz\t131073\n", None),
        ("a.psv", "id|tokens|l\nx|5|[1, 2]\ny|1|[]\nz|131073|[]\n", "tokens"),
        ("a.csv", "5\n1\n131073\n", None),
        ("a.txt", "\ufeff5\n1\n131073", None),
        ("lengths", " 5 \r\n1\r\n\r\n131073.0\r\n", None),
        ("lengths", "[5, 1, 131073]", None),
        ("lengths", '{"tokens": 5}\n{"tokens": 1}\n{"tokens": 131073}\n', None),
        ("lengths.txt", "id,tokens\nx,5\ny,1\nz,131073\n", None),
        ("a.idx", idx([5, 1, 131073]), None),
        ("a.idx", idx([5, 1, 131073], modes=True), None),
        ("no_suffix", idx([5, 1, 131073]), None),
    ],
)
def test_every_form_gives_the_same_lengths(tmp_path, name, content, column):
    found = read_lengths(write(tmp_path, name, content), column)
    assert found.tolist() == [5, 1, 131073]
    assert found.dtype == np.int64
    assert [s.tokens for s in read_samples(tmp_path / name, column)] == [5, 1, 131073]


@pytest.mark.parametrize(
    ("name", "content", "column", "cause"),
    [
        ("a.json", "[3, -1]", None, ", entry 1: -1 is not a length"),
        ("a.json", "[0]", None, ", entry 0: 0 is not a length"),
        ("a.json", "[3, 2.5]", None, ", entry 1: 2.5 is not a length"),
        ("a.json", "[3, NaN]", None, ", entry 1: NaN is not a length"),
        ("a.json", "[3, 1e999]", None, ", entry 1: Infinity is not a length"),
        ("a.json", "[3, true]", None, ", entry 1: true is not a length"),
        ("a.json", "[3, null]", None, ", entry 1: null is not a length"),
        ("a.json", "[[3]]", None, ", entry 0: [3] is not a length"),
        ("a.json", "[9223372036854775808]", None, ", entry 0: 9223372036854775808 is not a length"),
        ("a.json", "[]", None, " holds no lengths"),
        ("a.json", "[3,\n4", None, ", line 2: not JSON (Expecting ',' delimiter)"),
        ("a.json", '{"a": [3]}', None, " holds a JSON object, not a list"),
        ("a.json", "[" * 100_000, None, ": JSON nested too deep, or a number too long"),
        ("a.json", '[{"a": 1, "b": 2}]', None, ", entry 0: which column holds the lengths? There are: a, b"),
        ("a.json", "[3]", "n", " holds plain numbers and has no column 'n'"),
        ("a.jsonl", "3\n\n4 5\n", None, ", line 3: not JSON: 4 5"),
        ("a.jsonl", '{"tokens": 3}\n\n{"tokens": 0}', None, ", line 3: 0 is not a length"),
        ("a.csv", "id,n\nx,3\n", "tokens", ": no column 'tokens'"),
        ("a.csv", "id,n\nx,3\n", None, ": which column holds the lengths? There are: id, n"),
        ("a.csv", "id,tokens\nx,3\ny,\n", None, ", line 3: an empty cell is not a length"),
        ("a.csv", "id,tokens\nx,3\ny\n", None, ", line 3: an empty cell is not a length"),
        ("a.csv", 'id,tokens\n"x\ny",3\nz,nan\n', None, ", line 4: nan is not a length"),
        ("a.csv", "3,4\n5,6\n", None, " has no header line"),
        ("a.csv", "0,843,train\n1,5,train\n", None, " has no header line"),
        ("a.csv", "0,843,train\n1,5,train\n", "843", " has no header line"),
        ("a.csv", "id,tokens\n", None, " holds no lengths"),
        ("a.txt", "3\n-4\n", None, ", line 2: -4 is not a length"),
        ("a.txt", "3\n\nmany\n", None, ", line 3: many is not a length"),
        ("a.txt", "3\n", "n", " is plain text and has no column 'n'"),
        ("a.txt", "9" * 5000, None, ", line 1: " + "9" * 37 + "... is not a length"),
        ("a.txt", "", None, " is empty"),
        ("a.json", " \n", None, " is empty"),
        ("a.txt", b"3\n\x00\x01", None, " is a binary file"),
        ("a.json", b"\x1f\x8b\x08", None, " is a binary file"),
        ("a.idx", b"nonsense", None, " is not a Megatron .idx: it does not begin with MMIDIDX"),
        ("a.idx", idx([3])[:20], None, " is truncated: 20 bytes, the header alone has 34"),
        ("a.idx", idx([3], version=2), None, " is .idx version 2; version 1 is read"),
        ("a.idx", idx([3], code=9), None, " has the unknown data type code 9; 1..8 are known"),
        ("a.idx", idx([]), None, " holds no sequences"),
        ("a.idx", idx([3, 0]), None, ", entry 1: 0 is not a length"),
        (
            "a.idx",
            idx([3, 4])[:-1],
            None,
            " is truncated: 2 sequences and 3 document indices make 82 bytes, the file has 81",
        ),
        (
            "a.idx",
            idx([3]) + b"12",
            None,
            " has bytes left over: 1 sequences and 2 document indices make 62 bytes, the file has 64",
        ),
    ],
)
def test_every_fault_names_file_and_place(tmp_path, name, content, column, cause):
    path = write(tmp_path, name, content)
    with pytest.raises(LengthsError) as caught:
        read_lengths(path, column)
    assert caught.value.cause == f"{path}{cause}"
    assert caught.value.remedy


@pytest.mark.parametrize(("text", "remedy"), [("1\n2\n", ".jsonl"), ("[1,,2]", "Mend that line")])
def test_what_to_do_about_broken_json_depends_on_how_it_is_broken(tmp_path, text, remedy):
    """Only what holds several values may be JSON lines."""
    with pytest.raises(LengthsError, match="not JSON") as caught:
        read_lengths(write(tmp_path, "a.json", text))
    assert remedy in caught.value.remedy


def test_a_header_may_hold_numbers_beside_the_name(tmp_path):
    """A year, say."""
    assert read_lengths(write(tmp_path, "a.csv", "2023,seqlen\n7,3\n")).tolist() == [3]


def test_remedies_name_the_columns_and_the_rule(tmp_path):
    with pytest.raises(LengthsError, match=r"Columns there are: id, n\."):
        read_lengths(write(tmp_path, "a.csv", "id,n\nx,3\n"), "tokens")
    with pytest.raises(LengthsError, match=WHOLE):
        read_lengths(write(tmp_path, "a.txt", "0"))


def test_a_missing_file_suggests_its_neighbour_and_a_folder_the_command(tmp_path):
    path = write(tmp_path, "lengths.json", "[1]")
    with pytest.raises(LengthsError) as caught:
        read_lengths(tmp_path / "length.json")
    assert str(caught.value) == f"{tmp_path / 'length.json'} does not exist\nDid you mean {path}?"
    with pytest.raises(LengthsError, match=r"is a folder, not a length file\n.*flexcp lengths .* --out"):
        read_lengths(tmp_path)


def test_samples_carry_spans(tmp_path):
    path = write(tmp_path, "a.json", '[4, {"tokens": 9, "spans": [[2, 6], [7, 9]]}]')
    assert read_samples(path) == (Sample(0, 4), Sample(1, 9, ((2, 6), (7, 9))))
    assert read_lengths(path).tolist() == [4, 9]


@pytest.mark.parametrize(
    ("spans", "cause"),
    [
        ("[[2, 12]]", "line 1: sample 0 has the span [2, 12) in 9 tokens"),
        ("[[2]]", "line 1: spans [[2]] are not pairs of whole numbers"),
        ("[[2, 2.5]]", "line 1: spans [[2, 2.5]] are not pairs of whole numbers"),
        ("7", "line 1: spans 7 are not pairs of whole numbers"),
    ],
)
def test_wrong_spans_are_named(tmp_path, spans, cause):
    path = write(tmp_path, "a.jsonl", f'{{"tokens": 9, "spans": {spans}}}')
    with pytest.raises(LengthsError) as caught:
        read_samples(path)
    assert caught.value.cause == f"{path}, {cause}"


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 2**40), min_size=1), suffix=st.sampled_from([".json", ".csv", ".txt"]))
def test_what_is_written_reads_back(tmp_path_factory, lengths, suffix):
    path = tmp_path_factory.mktemp("w") / f"a{suffix}"
    write_lengths(path, np.array(lengths))
    assert read_lengths(path).tolist() == lengths
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_writing_refuses_other_suffixes_and_wrong_lengths(tmp_path):
    with pytest.raises(LengthsError, match=r"no length file ends in '.npz'\nName it .json, .csv or .txt."):
        write_lengths(tmp_path / "a.npz", [1])
    with pytest.raises(LengthsError, match="entry 1: 0 is not a length"):
        write_lengths(tmp_path / "a.json", [1, 0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt", "a.csv"])
def test_a_million_entries_take_seconds_at_most(tmp_path, name):
    values = list(range(1, 1_000_001))
    head = "tokens\n" if name == "a.csv" else ""
    text = json.dumps(values) if name == "a.json" else head + "\n".join(map(str, values))
    path = write(tmp_path, name, text)
    start = time.perf_counter()
    assert read_lengths(path).sum() == sum(values)
    assert time.perf_counter() - start < 10  # a second on one free core


@pytest.mark.parametrize(
    ("name", "column", "count", "total", "longest"),
    [
        ("distca_dist_prolong.json", None, 77_932, 237_840_913, 340_149),
        ("python_source_lengths_qwen.json", None, 2_500, 9_846_207, 137_848),
        ("meg-gpt2-openwebtext_text_document.idx", None, 1_000, 1_361_845, 21_809),
        ("ag_news_prompt_targets_document.idx", None, 100, None, 4),
        ("azure_llm_2023_conv.csv", "ContextTokens", 19_366, 22_361_870, 14_050),
        ("distca_attn_dist_multimodal_64k.psv", "total_len", 2_656, 174_063_616, 65_536),
    ],
)
def test_real_files(name, column, count, total, longest):
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not part of the repository")
    lengths = read_lengths(SHARED / name, column)
    assert len(lengths) == count
    assert lengths.max() == longest
    assert total is None or lengths.sum() == total


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "[5, " + "9" * 5000 + "]", "a.json: "),
        ("a.jsonl", "5\n" + "9" * 5000 + "\n", "a.jsonl, line 2: not JSON"),
        ("a.csv", "\ufeff", "a.csv is empty"),
    ],
)
def test_odd_files_are_a_sentence_too(tmp_path, name, content, words):
    """Numbers of thousands of digits, and a byte-order mark with nothing behind it."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")

    with pytest.raises(LengthsError) as caught:
        read_lengths(path)
    assert words in caught.value.cause


def test_a_name_too_long_for_the_file_system_is_a_sentence(tmp_path):
    """The error of the system, not a traceback."""
    with pytest.raises(LengthsError, match="cannot be read"):
        read_lengths(tmp_path / ("a" * 300 + ".json"))
