"""Chats to tokens: the template of a model, and labels for what the assistant says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainers.sft import example

from flexcp.core.errors import DataError
from flexcp.train.data.chats import ChatTokenizer
from flexcp.train.data.dataset import open_dataset

MESSAGES = [
    {"role": "user", "content": "hé"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "ok"},
]
UNMARKED = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
REWRITING = "{% for m in messages %}{{ m.content if loop.last else '-' }}{% endfor %}"


def saved(folder: Path, template: str | None = None) -> Path:
    tokenizer = example().tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", [None, UNMARKED])
def test_what_the_assistant_says_is_learned_with_its_end(template: str | None, tmp_path: Path) -> None:
    """By the template's marks, or by what a message adds; the same labels."""
    tokenizer = ChatTokenizer(saved(tmp_path, template))
    ids, labels = tokenizer.encode_labelled(json.dumps(MESSAGES))
    text = tokenizer._tokenizer

    assert (
        text.decode(ids) == "<|user|>hé<|end|><|assistant|>yes<|end|><|user|>?<|end|><|assistant|>ok<|end|>"
    )
    assert text.decode(ids[labels != -100]) == "yes<|end|>ok<|end|>"
    assert np.array_equal(labels[labels != -100], ids[labels != -100])
    assert (
        tokenizer.count([json.dumps(MESSAGES)]) == [len(ids)] == [len(tokenizer.encode(json.dumps(MESSAGES)))]
    )
    everything = ChatTokenizer(tmp_path, "all")
    assert np.array_equal(everything.encode_labelled(json.dumps(MESSAGES))[1], ids)
    assert everything.fingerprint != tokenizer.fingerprint


def test_templates_that_cannot_tell_are_refused(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(saved(tmp_path, REWRITING))
    with pytest.raises(
        DataError, match=r"the chat template rewrites earlier messages.*\nMark it in the templ"
    ):
        tokenizer.encode_labelled(json.dumps(MESSAGES))
    with pytest.raises(DataError, match="nowhere is no folder of a tokenizer"):
        ChatTokenizer("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty holds no tokenizer"):
        ChatTokenizer(tmp_path / "empty")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_data_set_of_chats(kind: str, tmp_path: Path) -> None:
    """Lengths are counted once and hold; a null is no sample."""
    rows: list[dict[str, Any]] = [{"messages": MESSAGES}, {"messages": None}, {"messages": MESSAGES[:2]}]
    path = tmp_path / f"chats.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    folder = saved(tmp_path / "model")
    for _ in range(2):  # the second time from the index
        data = open_dataset(path, tokenizer=folder, chat_column="messages")
        assert [len(data[i]["input_ids"]) for i in range(2)] == data.lengths.tolist()
    assert (data[1]["labels"] != -100).sum() == 4  # y e s and the end
    assert [skipped.reason for skipped in data.skipped] == ["not text"]
    assert (open_dataset(path, tokenizer=folder, chat_column="messages", learn="all")[1]["labels"] >= 0).all()


@pytest.mark.parametrize("value", ["text", [], [{"role": "user"}], [{"role": "user", "content": 3}], [7]])
def test_what_is_no_chat_is_named(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": value}))
    with pytest.raises(
        DataError, match=r"chats\.jsonl:1 holds no chat in that column\nGive a list of messages"
    ):
        open_dataset(path, tokenizer=saved(tmp_path / "model"), chat_column="messages")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a")
    with pytest.raises(DataError, match="holds text files, and no chats"):
        open_dataset(tmp_path / "text", tokenizer=tmp_path / "model", chat_column="messages")


def test_chats_that_teach_nothing_are_skipped_by_name(tmp_path: Path) -> None:
    """A role that is misspelt, or no answer: their labels would be none, in silence."""
    path, folder = tmp_path / "chats.jsonl", saved(tmp_path / "model")
    chats = [MESSAGES, [{"role": "asistant", "content": "yes"}], MESSAGES[:1]]
    path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    data = open_dataset(path, tokenizer=folder, chat_column="messages")

    assert len(data) == 1
    assert [str(skipped) for skipped in data.skipped] == [
        "2 skipped, no turn to learn: chats.jsonl:2, chats.jsonl:3"
    ]
    assert len(open_dataset(path, tokenizer=folder, chat_column="messages", learn="all")) == 3


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ raise_exception('no') }}", "{{ messages[9].content }}"]
)
def test_a_template_that_fails_is_named(template: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(saved(tmp_path / "model", template))
    with pytest.raises(DataError, match=r"the chat template in .*model fails on \[\{\"role\": \"user\""):
        tokenizer.encode(json.dumps(MESSAGES))
