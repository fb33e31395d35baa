"""Text to token ids: bytes as they are, or any `tokenizer.json`; and training a small BPE.

Documents end with the end-of-sequence token; padding and truncation do not exist here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import ConfigError, DataError, MissingExtraError

TokenIds = npt.NDArray[np.int32]
TEACHES_NOTHING = -2  # for a count: text that is whole, and of which nothing is learned

# End-of-document tokens of public models, for a tokenizer.json without a tokenizer_config.json beside it.
USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_LARGEST_VOCAB = 2**22  # many times any that is in use; room for it is taken at once


class Tokenizer(Protocol):
    """What a data set needs to know of a tokenizer.

    Attributes:
        vocab_size: one more than the largest id.
        eos_id: id that ends every document, or None where the tokenizer has none.
        fingerprint: changes whenever the same text could give other ids.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def eos_id(self) -> int | None: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def encode(self, text: str) -> TokenIds:
        """Token ids of a whole document, end token included: int32 [tokens]."""
        ...

    def count(self, texts: Sequence[str]) -> list[int]:
        """`len(encode(text))` of each text, faster."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and 256 to end a document. Needs nothing installed.

    >>> ByteTokenizer().encode("hé").tolist()
    [104, 195, 169, 256]
    """

    vocab_size = 257
    eos_id = 256
    fingerprint = "bytes/1"

    def encode(self, text: str) -> TokenIds:
        """Bytes of `text`, then 256: int32 [bytes + 1]."""
        data = np.frombuffer(text.encode(), np.uint8)
        return np.append(data, np.array([self.eos_id])).astype(np.int32)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Bytes of each text, plus one."""
        return [len(text.encode()) + 1 for text in texts]


class FileTokenizer:
    """A `tokenizer.json`, as Hugging Face models ship it.

    Ids are what the file says, its own template (a begin token, say) included. Then the end token is
    appended unless the template has already put it there. It is the `eos_token` of the
    `tokenizer_config.json` beside the file, else the first of `USUAL_EOS` in the vocabulary, else none.
    Truncation and padding that the file asks for are switched off: no token is dropped or made up.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        DataError: no such file, or the `tokenizers` library cannot read it.
        MissingExtraError: the `tokenizers` library is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"tokenizer {file} cannot be read ({error.strerror})",
                "Give a tokenizer.json, the folder that holds it, or 'bytes'.",
            ) from None
        try:
            self._tokenizer = _library().Tokenizer.from_buffer(content)
        except MissingExtraError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{file} is not a tokenizer.json ({error})", "Save it with the tokenizers library."
            ) from None
        self._file = file
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values()) + 1
        self.eos_id: int | None = _find_eos(file, vocab)
        self.fingerprint = hashlib.sha256(content + f"eos={self.eos_id}".encode()).hexdigest()

    def encode(self, text: str) -> TokenIds:
        """Ids of `text`, end token included: int32 [tokens]."""
        ids = self._tokenizer.encode(text).ids
        return np.array([*ids, self.eos_id] if self._wants_eos(ids) else ids, dtype=np.int32)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Lengths of many texts; the library spreads them over the cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        return [len(e) + self._wants_eos(e.ids[-1:]) for e in encodings]

    def special_id(self, name: str, usual: str) -> int | None:
        """Id of the token that `tokenizer_config.json` calls `name`, else of the `usual` one."""
        token = _declared(self._file, name) or usual
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def _wants_eos(self, ids: list[int]) -> bool:
        return self.eos_id is not None and ids[-1:] != [self.eos_id]


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | Path) -> FileTokenizer:
    """Train a byte-level BPE and write its `tokenizer.json`.

    The same texts in the same order give the same file. Every text can be encoded: all 256 bytes are in
    the vocabulary. Little text may give fewer entries than asked for; see `vocab_size` of the result.

    Raises:
        ConfigError: `vocab_size` below 257 (256 bytes and the end token), or beyond all reason.
        MissingExtraError: the `tokenizers` library is not installed.
    """
    if not 257 <= vocab_size <= _LARGEST_VOCAB:
        raise ConfigError(
            f"vocab_size is {vocab_size}", f"A byte-level BPE has 257 to {_LARGEST_VOCAB} entries."
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[USUAL_EOS[0]],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return FileTokenizer(path)


def _declared(file: Path, name: str) -> str | None:
    """A special token that the `tokenizer_config.json` beside the file names."""
    token = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((file.parent / "tokenizer_config.json").read_text(encoding="utf-8"))
        more = config.get("extra_special_tokens")
        token = config.get(name) or (more.get(name) if isinstance(more, dict) else None)
    if isinstance(token, dict):  # older files write the token with its flags
        token = token.get("content")
    return token if isinstance(token, str) else None


def _find_eos(file: Path, vocab: dict[str, int]) -> int | None:
    declared = _declared(file, "eos_token")
    if declared is not None:
        if declared not in vocab:
            raise DataError(
                f"{file.parent / 'tokenizer_config.json'} names the end token {declared!r}, "
                f"which {file.name} does not hold",
                "Take both files from the same model.",
            )
        return vocab[declared]
    return next((vocab[token] for token in USUAL_EOS if token in vocab), None)


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise MissingExtraError("tokenizers", "train") from None
    return tokenizers
