"""The data of a run: what is left out is said, what is held out is held out, and odd data is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from flexcp.core.errors import ConfigError, DataError
from flexcp.train.config import DataSection
from flexcp.train.corpus import Corpus, open_corpus


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank, in this process."""
    store = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    data.mkdir()
    for i in range(6):
        (data / f"{i}.txt").write_text("text " * (i + 1))
    return data


def open_folder(folder: Path, seed: int = 0, **options: Any) -> Corpus:
    return open_corpus(DataSection(path=str(folder), **options), lambda vocab: 10**9, seed, lambda *_: None)


def test_empty_and_binary_files_are_skipped_with_a_notice(folder: Path) -> None:
    (folder / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\x00\xff")
    corpus = open_folder(folder)

    assert corpus.train.lengths.tolist() == [6, 11, 16, 21, 26, 31]
    assert corpus.evaluation is None
    assert (corpus.vocab, corpus.longest) == (257, 31)
    assert sorted(map(str, corpus.skipped)) == [
        "1 skipped, empty: empty.txt",
        "1 skipped, not text: image.png",
    ]


def test_data_of_empty_files_alone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError) as caught:
        open_folder(tmp_path)

    assert str(caught.value) == "the data gives no sample\n2 skipped, empty: a.txt, b.txt"


@pytest.mark.parametrize("held_out", [6, 7])
def test_something_must_be_left_to_train_on(folder: Path, held_out: int) -> None:
    with pytest.raises(ConfigError) as caught:
        open_folder(folder, eval_samples=held_out)

    assert str(caught.value) == f"data.eval_samples is {held_out}, the data has 6 samples\nHold out fewer."


def test_samples_are_trained_on_or_held_out(folder: Path) -> None:
    """Never both; the choice follows from the seed alone."""
    corpus, again, other = (open_folder(folder, seed, eval_samples=2) for seed in (0, 0, 2))
    assert corpus.evaluation is not None
    everything = np.concatenate([corpus.train.lengths, corpus.evaluation.lengths])

    assert sorted(everything.tolist()) == [6, 11, 16, 21, 26, 31]
    assert (len(corpus.train), len(corpus.evaluation)) == (4, 2)
    assert corpus.train.lengths.tolist() == again.train.lengths.tolist()
    assert corpus.train.lengths.tolist() != other.train.lengths.tolist()
    assert corpus.identity == again.identity
    for subset in (corpus.train, corpus.evaluation):
        assert [len(subset[i]["input_ids"]) for i in range(len(subset))] == subset.lengths.tolist()


def test_what_the_ranks_hold_is_the_limit(folder: Path) -> None:
    """D28: a sample above it is refused, or left out by name."""
    section = DataSection(path=str(folder))
    with pytest.raises(DataError, match=r"^5\.txt has 31 tokens, more than 30, and so have 1 of 6 documents"):
        open_corpus(section, lambda vocab: 30, 0, lambda *_: None)
    skipping = DataSection(path=str(folder), too_long="skip")
    corpus = open_corpus(skipping, lambda vocab: 30, 0, lambda *_: None)
    assert [str(note) for note in corpus.skipped] == ["1 skipped, longer than 30 tokens: 5.txt"]


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        (
            {"path": "@stdlib"},
            "data.index_dir is not set",
            "The interpreter's own folder is not written to.",
        ),
        (
            {"tokenizer": "bpe:300"},
            "data.index_dir is not set",
            "A trained tokenizer needs a folder to live in.",
        ),
        ({"tokenizer": "bpe:big"}, "data.tokenizer 'bpe:big' has no vocabulary size", "For example bpe:4096"),
    ],
)
def test_options_that_need_another(folder: Path, options: dict[str, Any], cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_corpus(DataSection(**{"path": str(folder), **options}), lambda vocab: 10**9, 0, lambda *_: None)

    assert (caught.value.cause, caught.value.remedy) == (cause, remedy)


def test_a_tokenizer_is_trained_once_per_data(folder: Path, tmp_path: Path) -> None:
    """Other data train another one."""
    seen: list[str] = []
    section = DataSection(path=str(folder), tokenizer="bpe:264", index_dir=tmp_path / "index")

    def progress(what: str, done: int, total: int) -> None:
        if not done:
            seen.append(what)

    first = open_corpus(section, lambda vocab: 10**9, 0, progress)
    assert seen.count("training the tokenizer") == 1
    assert open_corpus(section, lambda vocab: 10**9, 0, progress).identity == first.identity
    assert seen.count("training the tokenizer") == 1
    (folder / "new.txt").write_text("more text")
    with_new = open_corpus(section, lambda vocab: 10**9, 0, progress)
    assert seen.count("training the tokenizer") == 2
    assert len(with_new.train) == 7


@pytest.mark.parametrize("pattern", ["**x", "***", ".", "x" * 300])
def test_a_pattern_that_is_none_is_named(folder: Path, pattern: str) -> None:
    with pytest.raises(DataError, match=r"^pattern '.*' cannot be looked for in "):
        open_folder(folder, pattern=pattern)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that is there and fails to read")
def test_a_disk_that_does_not_read_is_a_sentence(tmp_path: Path) -> None:
    """Whatever it says."""
    section = DataSection(path="/proc/self/mem", index_dir=tmp_path)
    with pytest.raises(DataError, match=r"^the data cannot be opened: .*Input/output error"):
        open_corpus(section, lambda vocab: 10**9, 0, lambda *_: None)


def test_a_vocabulary_beyond_all_reason_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size is 9{20}"):
        open_folder(folder, tokenizer="bpe:" + "9" * 20, index_dir=tmp_path / "index")
