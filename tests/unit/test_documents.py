"""Documents: every kind of data behind one protocol."""

import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexcp.core.errors import DataError, MissingExtraError
from flexcp.train.data.dataset import open_documents

TEXTS = ["eins", "", "drei\nZeilen", "größe 日本", "x" * 5000]


def folder(path):
    for i, text in enumerate(TEXTS):
        (path / "sub").mkdir(exist_ok=True)
        (path / "sub" / f"{i}.txt").write_bytes(text.encode())
    return path


def jsonl(path):
    lines = [json.dumps({"id": 1, "text": text}) for text in TEXTS]
    (path / "a.jsonl").write_text("\n\n".join(lines[:2]) + "\n")
    (path / "b.jsonl").write_text("\r\n".join(lines[2:]))
    return path


def parquet(path):
    pq.write_table(pa.table({"text": TEXTS[:3], "n": [1, 2, 3]}), path / "a.parquet", row_group_size=2)
    pq.write_table(pa.table({"text": TEXTS[3:], "n": [1, 2]}), path / "b.parquet", row_group_size=1)
    return path


def saved(path, text_type=None, **state):
    names = []
    for i, part in enumerate((TEXTS[:2], TEXTS[2:])):
        names.append(f"data-{i:05d}-of-00002.arrow")
        table = pa.table({"n": list(range(len(part))), "text": pa.array(part, text_type or pa.string())})
        with pa.OSFile(str(path / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=1)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names], **state}))
    return path


@pytest.mark.parametrize("make", [folder, jsonl, parquet, saved])
def test_every_kind_gives_its_texts_at_random(tmp_path, make):
    documents = open_documents(make(tmp_path))
    assert len(documents) == len(TEXTS)
    order = [3, 0, 4, 4, 1, 2]
    assert [documents[i] for i in order] == [TEXTS[i] for i in order]
    assert documents.skipped == ()
    with pytest.raises(IndexError):
        documents[len(TEXTS)]


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (folder, ["sub/0.txt", "sub/4.txt"]),
        (jsonl, ["a.jsonl:1", "b.jsonl:3"]),
        (parquet, ["a.parquet:row 0", "b.parquet:row 1"]),
        (saved, ["data-00000-of-00002.arrow:row 0", "data-00001-of-00002.arrow:row 2"]),
    ],
)
def test_names_lead_to_the_place(tmp_path, make, names):
    documents = open_documents(make(tmp_path))
    assert [documents.name(0), documents.name(4)] == names


@pytest.mark.parametrize("make", [folder, jsonl, parquet, saved])
def test_the_fingerprint_follows_files_and_column(tmp_path, make):
    path = make(tmp_path)
    before = open_documents(path).fingerprint()
    assert open_documents(path).fingerprint() == before
    file = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl", ".parquet", ".arrow"))[-1]
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert open_documents(path).fingerprint() != before


def test_large_strings_are_texts_too(tmp_path):
    assert open_documents(saved(tmp_path, pa.large_string()))[3] == TEXTS[3]


def test_blank_lines_are_counted_in_line_numbers(tmp_path):
    documents = open_documents(jsonl(tmp_path))
    assert documents.name(1) == "a.jsonl:3"


def test_a_folder_is_sorted_and_passes_over_links_and_caches(tmp_path):
    for name in ("b.py", "a/z.py", "a.txt", ".git/x.py", "a/__pycache__/y.py", ".hidden.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")
    (tmp_path / "folder").symlink_to(tmp_path / "a")
    documents = open_documents(tmp_path, pattern="**/*.py")
    assert [documents[i] for i in range(len(documents))] == ["a/z.py", "b.py"]
    assert [str(note) for note in documents.skipped] == ["1 skipped, symbolic link: link.py"]
    below = open_documents(tmp_path, pattern="*/*.py")
    assert [str(note) for note in below.skipped] == ["1 skipped, symbolic link: folder/z.py"]


def test_linked_data_files_are_read(tmp_path):
    """The hub cache keeps snapshots as links to blobs."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text('{"text": "a"}\n')
    (tmp_path / "snap").mkdir()
    (tmp_path / "snap" / "train.jsonl").symlink_to(tmp_path / "blobs" / "1")
    assert open_documents(tmp_path / "snap")[0] == "a"


@pytest.mark.parametrize("content", [b"\x00\x01", b"caf\xe9"])
def test_what_is_not_text_is_none(tmp_path, content):
    (tmp_path / "x.py").write_bytes(content)
    assert open_documents(tmp_path / "x.py")[0] is None


def test_nulls_and_half_surrogates_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "\\ud800"}\n{"text": "\\ud83d\\ude00"}\n')
    documents = open_documents(tmp_path)
    assert [documents[i] for i in range(3)] == [None, None, "😀"]
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "a.parquet")
    assert open_documents(tmp_path / "a.parquet")[1] is None


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.jsonl", "{}\n{\n", "a.jsonl:1 has no key 'text'; it has: "),
        ("a.jsonl", "[1, 2]\n", "a.jsonl:1 has no key 'text'; it has: no object there"),
        ("a.jsonl", '\n{"txt": "x", "id": 3}', "a.jsonl:2 has no key 'text'; it has: txt, id"),
        ("a.jsonl", '{"text": 3}\n', "a.jsonl:1 holds a int where text belongs"),
        ("a.jsonl", '{"text": "x"\n', "a.jsonl:1 is not JSON"),
        ("a.parquet", "PAR1", "a.parquet is not a readable parquet file ("),
    ],
)
def test_faults_name_file_and_line(tmp_path, name, content, text):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        open_documents(tmp_path)[0]
    assert text in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize("make", [parquet, saved])
def test_a_missing_column_names_those_there_are(tmp_path, make):
    with pytest.raises(DataError, match=r"has no column 'body'; it has: (text, n|n, text)\n"):
        open_documents(make(tmp_path), text_column="body")


def test_splits_and_selections_of_a_saved_dataset_are_explained(tmp_path):
    saved(tmp_path, _indices_data_files=[{"filename": "i.arrow"}])
    with pytest.raises(
        DataError, match=r"keeps a selection of rows.*\nSave it again after .*flatten_indices"
    ):
        open_documents(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError) as caught:
        open_documents(tmp_path)
    assert str(caught.value) == f"{tmp_path} holds the splits train\nName one of them: {tmp_path / 'train'}"


def test_faults_of_paths_are_named(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "x"}')
    with pytest.raises(DataError) as caught:
        open_documents(tmp_path / "data.json")
    assert str(caught.value) == (
        f"{tmp_path / 'data.json'} does not exist\nDid you mean {tmp_path / 'data.jsonl'}?"
    )
    with pytest.raises(DataError, match=r"no file in .* matches '\*\*/\*\.py'\n"):
        open_documents(tmp_path, pattern="**/*.py")
    for pattern in ("../*", "/etc/*", ""):
        with pytest.raises(DataError, match="leaves"):
            open_documents(tmp_path, pattern=pattern)
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(DataError, match=r"mixes jsonl and text files under '\*\*/\*'\nSay which to read"):
        open_documents(tmp_path)
    assert open_documents(tmp_path, pattern="*.jsonl")[0] == "x"


@pytest.mark.parametrize("make", [parquet, saved])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, make):
    make(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow is not installed.*\npip install 'flexcp\[train\]'"):
        open_documents(tmp_path)
