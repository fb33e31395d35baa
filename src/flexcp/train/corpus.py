"""The data of a run: opens it on all ranks (rank 0 builds what is missing) and holds samples out."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import ConfigError
from flexcp.runtime.collectives import on_first_rank
from flexcp.train.config import DataSection
from flexcp.train.data.dataset import TextDataset, open_dataset, open_documents, open_tokenizer
from flexcp.train.data.documents import Documents, Skipped
from flexcp.train.data.tokenizers import train_bpe

STDLIB = "@stdlib"
Progress = Callable[[str, int, int], None]
Capacity = Callable[[int], int]


class Subset:
    """Some samples of a data set, as a data set."""

    def __init__(self, dataset: TextDataset, indices: npt.NDArray[np.int64]) -> None:
        self.lengths = dataset.lengths[indices]
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int64]]:
        return self._dataset[int(self._indices[index])]

    def name(self, index: int) -> str:
        """File, and row or line."""
        return self._dataset.name(int(self._indices[index]))


@dataclass(frozen=True)
class Corpus:
    """Training and held-out samples.

    Attributes:
        vocab: size of the tokenizer's vocabulary.
        tokenizer: its file or folder; None for bytes.
        identity: of text, tokenizer, what was left out and held out; part of every checkpoint.
        skipped: what gave no sample, and why.
    """

    train: Subset
    evaluation: Subset | None
    vocab: int
    tokenizer: Path | None
    identity: dict[str, str]
    skipped: tuple[Skipped, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        held_out = int(self.evaluation.lengths.max()) if self.evaluation else 0
        return max(int(self.train.lengths.max()), held_out)


def open_corpus(section: DataSection, capacity: Capacity, seed: int, progress: Progress) -> Corpus:
    """Open the data of a run. All ranks call it.

    Args:
        section: what to read.
        capacity: from the size of the vocabulary to the longest sample that the ranks can hold; asked
            where the section names no limit.
        seed: decides which samples are held out.
        progress: called on rank 0 with (what, done, in all).
    """
    opened = on_first_rank(lambda: _open(section, capacity, progress), "opening the data")
    dataset, tokenizer = opened or _open(section, capacity, lambda *_: None)
    held_out = section.eval_samples
    if held_out >= len(dataset):
        raise ConfigError(
            f"data.eval_samples is {held_out}, the data has {len(dataset)} samples", "Hold out fewer."
        )
    order = np.random.Generator(np.random.PCG64([seed, 1])).permutation(len(dataset))
    train, evaluation = np.sort(order[held_out:]), np.sort(order[:held_out])
    return Corpus(
        train=Subset(dataset, train),
        evaluation=Subset(dataset, evaluation) if held_out else None,
        vocab=dataset.tokenizer.vocab_size,
        tokenizer=None if tokenizer == "bytes" else Path(tokenizer),
        identity={**dataset.identity, "samples held out": str(held_out)},
        skipped=dataset.skipped,
    )


def _open(section: DataSection, capacity: Capacity, progress: Progress) -> tuple[TextDataset, str]:
    path, pattern, exclude = section.path, section.pattern, section.exclude
    if path == STDLIB:
        if "pattern" in section.model_fields_set:
            raise ConfigError(f"data.pattern does not go with {STDLIB}", "Leave it out, or name a folder.")
        path, pattern = sysconfig.get_paths()["stdlib"], "**/*.py"
        exclude = ("site-packages", "test", "tests", "idle_test", *exclude)
        if section.index_dir is None:
            raise ConfigError("data.index_dir is not set", "The interpreter's own folder is not written to.")
    tokenizer = section.tokenizer
    if tokenizer.startswith("bpe:"):
        if section.chat_column is not None:
            raise ConfigError(
                f"data.chat_column is given, and data.tokenizer {tokenizer!r} has no chat template",
                "Name the folder of a chat model.",
            )
        documents = open_documents(path, pattern=pattern, exclude=exclude, text_column=section.text_column)
        tokenizer = str(_trained_bpe(section, documents, progress))
    dataset = open_dataset(
        path,
        tokenizer=tokenizer,
        pattern=pattern,
        exclude=exclude,
        text_column=section.text_column,
        chat_column=section.chat_column,
        learn=section.learn,
        index_dir=section.index_dir,
        max_tokens=section.max_tokens or capacity(open_tokenizer(tokenizer).vocab_size),
        too_long=section.too_long,
        remedy="Raise data.max_tokens"
        if section.max_tokens
        else "All ranks together hold no more: raise parallel.tokens_per_rank, use more ranks",
        progress=lambda done, total: progress("counting tokens", done, total),
    )
    return dataset, tokenizer


def _trained_bpe(section: DataSection, documents: Documents, progress: Progress) -> Path:
    """The tokenizer trained on these documents; kept by their fingerprint, so other data train anew."""
    vocab = section.tokenizer.removeprefix("bpe:")
    if not vocab.isdecimal():
        raise ConfigError(
            f"data.tokenizer {section.tokenizer!r} has no vocabulary size", "For example bpe:4096"
        )
    if section.index_dir is None:
        raise ConfigError("data.index_dir is not set", "A trained tokenizer needs a folder to live in.")
    path = section.index_dir / f"bpe-{vocab}-{documents.fingerprint()[:12]}" / "tokenizer.json"
    if not path.exists():
        progress("training the tokenizer", 0, 1)
        texts = (text for text in (documents[i] for i in range(len(documents))) if text)
        train_bpe(texts, int(vocab), path)
        progress("training the tokenizer", 1, 1)
    return path
