"""The length index: counted once, refused when it no longer belongs to the data."""

import os

import numpy as np
import pytest

from flexcp.core.errors import DataError
from flexcp.train.data.dataset import open_dataset, open_documents
from flexcp.train.data.index import EMPTY, NOT_TEXT, build_index, load_index, save_index
from flexcp.train.data.tokenizers import ByteTokenizer, train_bpe

REBUILD = "Build it again: rebuild=True, or delete the file."


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in {"a.txt": b"abc", "b.txt": b"", "c.txt": b"\x00", "d.txt": b"hello"}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def stored(data, tmp_path):
    documents = open_documents(data)
    path = tmp_path / "index.npz"
    save_index(build_index(documents, ByteTokenizer()), path)
    return path


def refused(path, data, tokenizer=None):
    with pytest.raises(DataError) as caught:
        load_index(path, open_documents(data), tokenizer or ByteTokenizer())
    return caught.value


def test_it_counts_every_document_and_marks_those_without_a_sample(data, stored):
    loaded = load_index(stored, open_documents(data), ByteTokenizer())
    assert loaded.lengths.tolist() == [4, EMPTY, NOT_TEXT, 6]
    assert loaded.lengths.dtype == np.int64
    assert [stamp.name for stamp in loaded.files] == ["a.txt", "b.txt", "c.txt", "d.txt"]


def test_progress_tells_how_far_it_is(data, monkeypatch):
    monkeypatch.setattr("flexcp.train.data.index._BATCH_DOCUMENTS", 3)
    seen = []
    index = build_index(open_documents(data), ByteTokenizer(), lambda done, total: seen.append((done, total)))
    assert seen == [(3, 4), (4, 4)]
    assert index.lengths.tolist() == [4, EMPTY, NOT_TEXT, 6]


def test_a_batch_ends_when_it_is_large(data, monkeypatch):
    monkeypatch.setattr("flexcp.train.data.index._BATCH_CHARACTERS", 3)
    seen = []
    build_index(open_documents(data), ByteTokenizer(), lambda done, total: seen.append(done))
    assert seen == [1, 4]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: (d / "a.txt").write_text("abcd"), "a.txt had 3 bytes and has 4"),
        (lambda d: (d / "d.txt").unlink(), "d.txt is gone"),
        (lambda d: (d / "aa.txt").write_text("new"), "aa.txt is new"),
        (lambda d: os.utime(d / "d.txt", ns=(1, 1)), "d.txt was written again"),
    ],
)
def test_changed_data_is_refused_by_name(data, stored, change, text):
    change(data)
    error = refused(stored, data)
    assert error.cause == f"the data changed since the length index {stored} was built: {text}"
    assert error.remedy == REBUILD


def test_another_tokenizer_is_refused(data, stored, tmp_path):
    other = train_bpe(["abc"], 260, tmp_path / "tokenizer.json")
    error = refused(stored, data, other)
    assert error.cause == f"the tokenizer is not the one that the length index {stored} was built with"


def test_another_way_of_reading_is_refused(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "code": "bc"}\n')
    save_index(build_index(open_documents(file), ByteTokenizer()), tmp_path / "i.npz")
    with pytest.raises(DataError, match="it is read in another way"):
        load_index(tmp_path / "i.npz", open_documents(file, text_column="code"), ByteTokenizer())


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk"])
def test_a_damaged_file_is_refused(data, stored, content):
    stored.write_bytes(content)
    error = refused(stored, data)
    assert error.cause.startswith(f"the length index {stored} is damaged (")
    assert error.remedy == REBUILD


def test_a_truncated_file_and_another_version_are_refused(data, stored):
    whole = stored.read_bytes()
    stored.write_bytes(whole[:-40])
    assert "is damaged (" in refused(stored, data).cause
    np.savez(stored, header=np.frombuffer(b'{"schema": "flexcp.index/9"}', np.uint8), lengths=np.ones(1))
    assert (
        "has the schema 'flexcp.index/9'; this version reads 'flexcp.index/1'" in refused(stored, data).cause
    )


def test_a_missing_index_is_named(data, tmp_path):
    error = refused(tmp_path / "none.npz", data)
    assert str(error) == f"there is no length index {tmp_path / 'none.npz'}\nBuild it first."


def test_an_interrupted_write_leaves_nothing(data, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyboardInterrupt

    index = build_index(open_documents(data), ByteTokenizer())
    monkeypatch.setattr(np, "savez_compressed", broken)
    with pytest.raises(KeyboardInterrupt):
        save_index(index, tmp_path / "out" / "i.npz")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_place_that_cannot_be_written_points_to_index_dir(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written \(.*\)\nName a folder that can be .*index_dir"):
        open_dataset(data, index_dir=tmp_path / "file")


def test_open_builds_once_then_loads(data, tmp_path):
    calls = []

    def progress(done, total):
        calls.append(done)

    first = open_dataset(data, progress=progress)
    second = open_dataset(data, progress=progress)
    assert calls == [4]
    assert first.identity == second.identity
    assert [p.parent.name for p in data.rglob("*.npz")] == [".flexcp"]
    (data / "a.txt").write_text("abcdef")
    with pytest.raises(DataError, match=r"a\.txt had 3 bytes and has 6"):
        open_dataset(data)
    assert open_dataset(data, rebuild=True).lengths.tolist() == [7, 6]
    open_dataset(data, index_dir=tmp_path / "elsewhere")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_two_tokenizers_and_two_patterns_keep_an_index_each(data, tmp_path):
    train_bpe(["abc hello"], 262, tmp_path / "tokenizer.json")
    for options in ({}, {"tokenizer": tmp_path}, {"pattern": "a*"}):
        open_dataset(data, **options)
    assert len(list((data / ".flexcp").iterdir())) == 3
    for options in ({}, {"tokenizer": tmp_path}, {"pattern": "a*"}):
        open_dataset(data, **options)
