"""The data of a run: opens it on all ranks (rank 0 builds what is missing) and holds samples out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import ConfigError, DataError
from flexcp.core.images import RowsOfImages
from flexcp.core.sample import Sample
from flexcp.runtime.collectives import on_first_rank
from flexcp.train.config import DataSection
from flexcp.train.data.dataset import TextDataset, open_dataset, open_documents, open_tokenizer
from flexcp.train.data.documents import Documents, Skipped
from flexcp.train.data.pictures import ImageFormat, PictureDataset, PictureRows, open_picture_index
from flexcp.train.data.tokenizers import train_bpe

STDLIB = "@stdlib"
Progress = Callable[[str, int, int], None]
Capacity = Callable[[int], int]
Price = Callable[[int, RowsOfImages], Sample]


class Subset:
    """Some samples of a data set, as a data set.

    Args:
        dataset: all of them.
        indices: which.
        price: how the planner sees a sample with images; None for text.
    """

    def __init__(
        self, dataset: TextDataset, indices: npt.NDArray[np.int64], price: Price | None = None
    ) -> None:
        self.lengths = dataset.lengths[indices]
        self._dataset = dataset
        self._indices = indices
        self._price = price

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        return self._dataset[int(self._indices[index])]

    def sample(self, index: int) -> Sample:
        """As the planner sees it."""
        if self._price is None or not isinstance(self._dataset, PictureDataset):
            return Sample(index, int(self.lengths[index]))
        return self._price(index, self._dataset.rows(int(self._indices[index])))

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


@dataclass(frozen=True)
class Images:
    """What the model of a run makes of images, and what they cost."""

    form: ImageFormat
    price: Price


def open_corpus(
    section: DataSection,
    capacity: Capacity,
    seed: int,
    progress: Progress,
    images: Images | None = None,
) -> Corpus:
    """Open the data of a run. All ranks call it.

    Args:
        section: what to read.
        capacity: from the size of the vocabulary to the longest sample that the ranks can hold; asked
            where the section names no limit.
        seed: decides which samples are held out.
        progress: called on rank 0 with (what, done, in all).
        images: of a vision-language model, where the section names a column of images.
    """
    opened = on_first_rank(lambda: _open(section, capacity, progress, images), "opening the data")
    dataset, tokenizer = opened or _open(section, capacity, lambda *_: None, images)
    held_out = section.eval_samples
    if held_out >= len(dataset):
        raise ConfigError(
            f"data.eval_samples is {held_out}, the data has {len(dataset)} samples", "Hold out fewer."
        )
    # By raw draws, as the order of training: a resumed run must hold out the same samples.
    order = np.argsort(np.random.PCG64([seed, 1]).random_raw(len(dataset)), kind="stable")
    train, evaluation = np.sort(order[held_out:]), np.sort(order[:held_out])
    price = images.price if images else None
    return Corpus(
        train=Subset(dataset, train, price),
        evaluation=Subset(dataset, evaluation, price) if held_out else None,
        vocab=dataset.tokenizer.vocab_size,
        tokenizer=None if tokenizer == "bytes" else Path(tokenizer),
        identity={**dataset.identity, "samples held out": _named(evaluation)},
        skipped=dataset.skipped,
    )


def _named(held_out: npt.NDArray[np.intp]) -> str:
    """How many, and a hash of which."""
    return f"{len(held_out)} ({hashlib.sha256(held_out.tobytes()).hexdigest()[:12]})"


def _open(
    section: DataSection, capacity: Capacity, progress: Progress, images: Images | None
) -> tuple[TextDataset, str]:
    try:
        return _opened(section, capacity, progress, images)
    except OSError as error:  # of disks, names and kinds of files that no reader thought of
        raise DataError(
            f"the data cannot be opened: {error}",
            "See that data.path and data.tokenizer can be read, and data.index_dir written.",
        ) from error


def _opened(
    section: DataSection, capacity: Capacity, progress: Progress, images: Images | None
) -> tuple[TextDataset, str]:
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
    if images is not None:
        return _open_pictures(section, tokenizer, capacity, progress, images.form), tokenizer
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
        remedy=_remedy(section),
        progress=lambda done, total: progress("counting tokens", done, total),
    )
    return dataset, tokenizer


def _open_pictures(
    section: DataSection, tokenizer: str, capacity: Capacity, progress: Progress, form: ImageFormat
) -> PictureDataset:
    """Rows of text and images."""
    documents = open_documents(
        section.path, pattern=section.pattern, exclude=section.exclude, text_column=section.text_column
    )
    root = Path(section.path)
    base = root if root.is_dir() else root.parent
    rows = PictureRows(documents, section.image_column or "images", base)
    loaded = open_tokenizer(tokenizer)
    index = open_picture_index(
        rows,
        loaded,
        form,
        section.index_dir or base / ".flexcp",
        lambda done, total: progress("reading sizes of images", done, total),
    )
    return PictureDataset(
        rows,
        loaded,
        form,
        index,
        max_tokens=section.max_tokens or capacity(loaded.vocab_size),
        too_long=section.too_long,
        remedy=_remedy(section),
    )


def _remedy(section: DataSection) -> str:
    if section.max_tokens:
        return "Raise data.max_tokens"
    return "All ranks together hold no more: raise parallel.tokens_per_rank, use more ranks"


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
