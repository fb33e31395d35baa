"""Tokenizers: bytes, `tokenizer.json`, and training a BPE."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexcp.core.errors import ConfigError, DataError, MissingExtraError
from flexcp.train.data.tokenizers import ByteTokenizer, FileTokenizer, train_bpe

TEXTS = ["def f(x):\n    return x\n", "class A:\n    pass\n", "größe = 'Ω' # 日本"] * 3


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture
def edited(tmp_path):
    """A trained tokenizer.json with some keys replaced."""

    def edit(config=None, **keys):
        train_bpe(TEXTS, 270, tmp_path / "tokenizer.json")
        body = json.loads((tmp_path / "tokenizer.json").read_text())
        body.update(keys)
        (tmp_path / "tokenizer.json").write_text(json.dumps(body))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return FileTokenizer(tmp_path)

    return edit


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_are_ids(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert bytes(ids[:-1].tolist()).decode() == text
    assert ids[-1] == tokenizer.eos_id == 256
    assert ids.dtype == np.int32
    assert tokenizer.count([text]) == [len(ids)]
    assert ids.max() < tokenizer.vocab_size


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), max_size=4))
def test_bpe_ends_documents_and_counts_what_it_encodes(bpe, texts):
    encoded = [bpe.encode(text) for text in texts]
    assert all(ids[-1] == bpe.eos_id and ids.max() < bpe.vocab_size for ids in encoded)
    assert bpe.count(texts) == [len(ids) for ids in encoded]


def test_training_twice_gives_the_same_file(tmp_path):
    code = (
        "import sys; from pathlib import Path; from flexcp.train.data.tokenizers import train_bpe;"
        f"print(train_bpe({TEXTS!r}, 300, Path(sys.argv[1])).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / f"{i}.json"], capture_output=True, check=True
        ).stdout
        for i in range(2)
    }
    assert len(prints) == 1
    assert (tmp_path / "0.json").read_bytes() == (tmp_path / "1.json").read_bytes()
    assert {entry.name for entry in tmp_path.iterdir()} == {"0.json", "1.json"}


def test_bpe_compresses_and_may_stay_below_the_size_asked_for(bpe, tmp_path):
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0])
    assert train_bpe(["ab"], 5000, tmp_path / "t.json").vocab_size == 258
    with pytest.raises(ConfigError, match=r"vocab_size is 256\nA byte-level BPE has 257 to \d+"):
        train_bpe(TEXTS, 256, tmp_path / "t.json")


def test_truncation_and_padding_of_the_file_are_switched_off(edited):
    """D28: a length limit hidden in tokenizer.json must not shorten a document."""
    tokenizer = edited(
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    text = "x " * 5000
    assert len(tokenizer.encode(text)) > 4000
    assert tokenizer.count([text, "x"]) == [len(tokenizer.encode(text)), 2]


def test_the_config_beside_the_file_names_the_end_token(edited):
    added = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [{"id": 0, "content": "<|endoftext|>", **added}, {"id": 900, "content": "<stop>", **added}]
    tokenizer = edited({"eos_token": {"content": "<stop>"}}, added_tokens=tokens)
    # The library numbers added tokens itself; whatever it chose is inside the vocabulary.
    assert tokenizer.encode("x")[-1] == tokenizer.eos_id != 0
    assert tokenizer.eos_id < tokenizer.vocab_size


def test_an_end_token_that_the_template_adds_is_not_added_again(edited):
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "E", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"E": {"id": "E", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    tokenizer = edited(post_processor=template)
    assert tokenizer.eos_id == 0
    assert tokenizer.encode("x").tolist().count(0) == 1
    assert tokenizer.count(["x"]) == [2]


def test_a_foreign_end_token_is_refused(edited):
    with pytest.raises(DataError, match=r"names the end token '</x>', which tokenizer.json does not hold"):
        edited({"eos_token": "</x>"})


def test_fingerprints_tell_tokenizers_apart(bpe, edited):
    assert len({bpe.fingerprint, edited().fingerprint, ByteTokenizer().fingerprint}) == 3


def test_faults_are_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer .*nope cannot be read \(No such file"):
        FileTokenizer(tmp_path / "nope")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer.json \("):
        FileTokenizer(tmp_path)


def test_a_missing_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        MissingExtraError, match=r"tokenizers is not installed.*\npip install 'flexcp\[train\]'"
    ):
        FileTokenizer(tmp_path)
