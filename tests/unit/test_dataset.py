"""The text data set: whole documents or nothing, and nothing in silence."""

import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from flexcp.core.errors import DataError
from flexcp.runtime.order import batch_indices, epoch_order
from flexcp.train.data import ByteTokenizer, open_dataset, train_bpe

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for i, text in enumerate(["a" * 9, "", "b" * 99, "c" * 999, "d" * 49]):
        (folder / f"{i}.txt").write_text(text)
    (folder / "5.bin").write_bytes(b"\x00")
    return folder


def test_samples_are_whole_documents_with_unshifted_labels(data):
    dataset = open_dataset(data)
    assert dataset.lengths.tolist() == [10, 100, 1000, 50]
    assert dataset.lengths.dtype == np.int64
    assert len(dataset) == 4
    for i in range(4):
        sample = dataset[i]
        assert set(sample) == {"input_ids", "labels"}
        assert sample["input_ids"].dtype == sample["labels"].dtype == np.int64
        assert sample["input_ids"].tolist() == sample["labels"].tolist()
        assert len(sample["input_ids"]) == dataset.lengths[i]
        assert sample["input_ids"][-1] == 256
    sample["labels"][0] = -100
    assert sample["input_ids"][0] != -100
    assert [dataset.name(i) for i in range(4)] == ["0.txt", "2.txt", "3.txt", "4.txt"]
    for index in (4, -1):
        with pytest.raises(IndexError):
            dataset[index]


def test_whatever_is_left_out_is_counted_and_named(data):
    dataset = open_dataset(data, max_tokens=99, too_long="skip")
    assert dataset.lengths.tolist() == [10, 50]
    assert [str(note) for note in dataset.skipped] == [
        "1 skipped, not text: 5.bin",
        "1 skipped, empty: 1.txt",
        "2 skipped, longer than 99 tokens: 2.txt, 3.txt",
    ]
    kept = len(dataset) + sum(note.count for note in dataset.skipped)
    assert kept == 6


def test_only_the_first_few_are_named(tmp_path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text("x" * i)
    notes = open_dataset(tmp_path, max_tokens=4, too_long="skip").skipped
    assert str(notes[-1]) == "5 skipped, longer than 4 tokens: 4.txt, 5.txt, 6.txt, …"


def test_a_long_sample_is_an_error_unless_told_otherwise(data):
    """D28: never truncated, never dropped in silence."""
    with pytest.raises(DataError) as caught:
        open_dataset(data, max_tokens=99)
    assert str(caught.value) == (
        "3.txt has 1000 tokens, more than 99, and so have 2 of 6 documents in all\n"
        "Raise max_tokens, or leave such documents out with too_long = 'skip'."
    )
    assert open_dataset(data, max_tokens=1000).lengths.max() == 1000


def test_no_sample_at_all_is_an_error(data):
    with pytest.raises(
        DataError, match=r"the data gives no sample\n.*4 skipped, longer than 5 tokens: 0.txt"
    ):
        open_dataset(data, max_tokens=5, too_long="skip")
    with pytest.raises(DataError, match=r"the data gives no sample\n1 skipped, empty: 1.txt"):
        open_dataset(data / "1.txt")
    (data / "x.jsonl").write_text("")
    with pytest.raises(DataError, match=r"the data gives no sample\nIt is empty."):
        open_dataset(data / "x.jsonl")


@pytest.mark.parametrize(
    ("content", "now"), [(b"a" * 20, "21 tokens"), (b"", "no text"), (b"\x00", "no text")]
)
def test_a_file_that_changes_under_the_run_is_noticed(data, content, now):
    dataset = open_dataset(data)
    (data / "0.txt").write_bytes(content)
    with pytest.raises(DataError) as caught:
        dataset[0]
    assert caught.value.cause == f"0.txt had 10 tokens in the length index and now has {now}"
    (data / "0.txt").unlink()
    with pytest.raises(DataError, match=r"0.txt cannot be read \(No such file or directory\)"):
        dataset[0]


def test_the_identity_survives_a_copy_and_names_what_differs(data, tmp_path):
    def differs(**options):
        other = open_dataset(data, **options).identity
        return [name for name in base if other[name] != base[name]]

    base = open_dataset(data).identity
    shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copy)
    shutil.rmtree(tmp_path / "copy" / ".flexcp")
    train_bpe(["aaaa"], 260, tmp_path / "tokenizer.json")
    assert open_dataset(tmp_path / "copy").identity == base
    assert differs() == []
    assert "tokenizer" in differs(tokenizer=tmp_path / "tokenizer.json")
    assert differs(max_tokens=99, too_long="skip") == ["samples"]
    assert "data (files and their sizes)" in differs(pattern="*.txt")


def test_a_quarter_million_tokens_cost_memory_in_proportion(tmp_path):
    """D27: nothing is quadratic in the length of a sample."""
    peaks = {}
    for tokens in (65_536, 262_144):
        (tmp_path / f"{tokens}.txt").write_text("x" * (tokens - 1))
        dataset = open_dataset(tmp_path / f"{tokens}.txt")
        tracemalloc.start()
        assert len(dataset[0]["input_ids"]) == tokens
        peaks[tokens] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[262_144] < 5 * peaks[65_536]
    assert peaks[262_144] < 64 * 262_144  # two int64 arrays, and copies on the way


def test_a_long_document_through_a_bpe_has_its_indexed_length(tmp_path):
    train_bpe(["lorem ipsum dolor"], 280, tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("".join(f"lorem {i} " for i in range(20_000)))
    dataset = open_dataset(tmp_path / "a.txt", tokenizer=tmp_path)
    assert len(dataset[0]["input_ids"]) == dataset.lengths[0] > 60_000


def test_a_run_that_stops_and_goes_on_sees_the_same_samples(data):
    """D59, at the level of token ids."""

    def run(first, last):
        dataset = open_dataset(data)
        epoch_order.cache_clear()
        batches = [batch_indices(len(dataset), 3, 5, step) for step in range(first, last)]
        return [[dataset[i]["input_ids"].tolist() for i in batch] for batch in batches]

    assert run(0, 4) + run(4, 9) == run(0, 9)


def test_data_needs_no_torch():
    code = (
        "import sys, flexcp.train.data, flexcp.cli.lengths;"
        "print([m for m in ('torch', 'tokenizers', 'pyarrow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_real_conversations(tmp_path):
    source = SHARED / "llamafactory_reason_tool_use_demo_50.jsonl"
    if not source.exists():
        pytest.skip(f"{source.name} is not part of the repository")
    dataset = open_dataset(source, text_column="tools", index_dir=tmp_path)
    assert len(dataset) == 50
    assert int(dataset.lengths.sum()) == sum(len(dataset[i]["labels"]) for i in range(50))
    assert isinstance(dataset.tokenizer, ByteTokenizer)
