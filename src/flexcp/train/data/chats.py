"""Chats to tokens by the template that belongs to a model, and which of them are learned.

A chat travels as the JSON of its messages, as any other document travels as its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import DataError
from flexcp.core.sample import IGNORE_INDEX
from flexcp.train.data.tokenizers import TEACHES_NOTHING, TokenIds

Learn = Literal["assistant", "all"]


def as_chat(value: object, name: str) -> str | None:
    """A value of a column of chats: a list of messages, or null.

    Raises:
        DataError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return json.dumps(value, ensure_ascii=False)
    raise DataError(
        f"{name} holds no chat in that column",
        'Give a list of messages, each with "role" and "content" (chat_column).',
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


class ChatTokenizer:
    """The tokenizer of a model's folder with its chat template (see `tokenizers.Tokenizer`).

    What the assistant says is found by the template's own marks ({% generation %}), or else as what a message
    adds to the chat before it.

    Args:
        folder: of the tokenizer, as transformers saves it.
        learn: what of a chat has labels: what the assistant says, with what ends it; or everything.

    Raises:
        DataError: no tokenizer there, or one without a chat template.
    """

    def __init__(self, folder: str | Path, learn: Learn = "assistant") -> None:
        self._tokenizer, self._folder = _load(folder), folder
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise DataError(
                f"the tokenizer in {folder} has no chat template", "Use the tokenizer of a chat model."
            )
        self._learn, self._has_marks = learn, "{% generation" in template or "{%- generation" in template
        vocab = self._tokenizer.get_vocab()
        self.vocab_size: int = max(vocab.values()) + 1
        self.eos_id: int | None = self._tokenizer.eos_token_id
        text = json.dumps([sorted(vocab.items()), template, learn])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, text: str) -> TokenIds:
        """Ids of a whole chat: int32 [tokens]."""
        return np.array(self._ids(json.loads(text)), dtype=np.int32)

    def count(self, texts: Sequence[str]) -> list[int]:
        """`len(encode(text))` of each chat; `TEACHES_NOTHING` where nobody's turn is learned."""
        chats = [json.loads(text) for text in texts]
        return [
            len(self._ids(messages)) if self._teaches(messages) else TEACHES_NOTHING for messages in chats
        ]

    def _teaches(self, messages: list[Any]) -> bool:
        return self._learn == "all" or any(message["role"] == "assistant" for message in messages)

    def encode_labelled(self, text: str) -> tuple[TokenIds, npt.NDArray[np.int64]]:
        """Ids, and labels that are -100 where a token is not learned; [tokens] each.

        Raises:
            DataError: the template rewrites earlier messages, so what the assistant added cannot be told.
        """
        messages = json.loads(text)
        if self._learn == "all":
            ids = self._ids(messages)
            learned = [True] * len(ids)
        elif self._has_marks:
            marked = self._rendered(messages, return_assistant_tokens_mask=True)
            ids, learned = marked["input_ids"], marked["assistant_masks"]
        else:
            ids = self._ids(messages)
            learned = self._added_by_assistant(messages, ids)
        tokens = np.array(ids, dtype=np.int32)
        return tokens, np.where(np.array(learned, dtype=bool), tokens.astype(np.int64), IGNORE_INDEX)

    def _added_by_assistant(self, messages: list[Any], ids: list[int]) -> list[bool]:
        learned = [False] * len(ids)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._ids(messages[:number], add_generation_prompt=True) if number else []
            after = self._ids(messages[: number + 1])
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise DataError(
                    "the chat template rewrites earlier messages, so what the assistant said cannot be told",
                    "Mark it in the template with {% generation %}, or say data.learn = 'all'.",
                )
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        return learned

    def _ids(self, messages: list[Any], *, add_generation_prompt: bool = False) -> list[int]:
        found = self._rendered(messages, add_generation_prompt=add_generation_prompt)
        return [int(token) for token in found["input_ids"]]

    def _rendered(self, messages: list[Any], **options: bool) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, return_dict=True, **options)
        except Exception as error:  # a template is a program, and may raise what it likes
            begun = json.dumps(messages, ensure_ascii=False)[:80]
            raise DataError(
                f"the chat template in {self._folder} fails on {begun}… ({type(error).__name__}: {error})",
                "Mend the template, or leave out chats that it does not take.",
            ) from error


def _load(folder: str | Path) -> Any:
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise DataError(f"{folder} is no folder of a tokenizer", "Chats need the folder of a chat model.")
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a folder that is not one
        raise DataError(
            f"{folder} holds no tokenizer ({str(error).splitlines()[0]})",
            "Give the folder of a chat model (data.tokenizer).",
        ) from error
