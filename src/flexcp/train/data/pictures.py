"""Text with images: rows of JSON lines or parquet, and an index of lengths made from headers of image files.

No torch here, and no image is decoded before a rank needs it. A sample is one row: its text, with `<image>`
where an image stands, and its images in order.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from flexcp.core.errors import DataError, InputError, MissingExtraError
from flexcp.core.images import ImageRule, Picture, RowsOfImages, lay_out
from flexcp.core.sample import IGNORE_INDEX
from flexcp.train.data.columnar import Parquet
from flexcp.train.data.dataset import TextDataset, TooLong
from flexcp.train.data.documents import Documents, FileStamp, JsonLines, Skipped
from flexcp.train.data.index import EMPTY, NOT_TEXT, LengthIndex, Progress
from flexcp.train.data.tokenizers import Tokenizer

IMAGE = "<image>"  # where an image stands in a text

Ints = npt.NDArray[np.int64]
_EIGHT_BIT = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "La", "RGBa"}
_ORIENTATION = 0x0112  # the EXIF tag, and the values by which width and height change places
_LYING = (5, 6, 7, 8)
Taken = TypeVar("Taken")


class ImageFormat(Protocol):
    """What a model makes of images.

    Attributes:
        rule: tokens from sizes.
        token: stands for every feature of an image.
        before, after: tokens around an image.
        margin: text on both sides of those tokens, which is encoded together with the text next to it.
        fingerprint: changes whenever the same image could give other tokens.
    """

    @property
    def rule(self) -> ImageRule: ...  # noqa: D102
    @property
    def token(self) -> int: ...  # noqa: D102
    @property
    def before(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def after(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def margin(self) -> str: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def pixels(self, images: Sequence[Any]) -> dict[str, npt.NDArray[Any]]:
        """Keywords of the model for some PIL images."""
        ...


@dataclass(frozen=True)
class PictureIndex:
    """Lengths and images of every row, in flat arrays.

    Attributes:
        lengths: int64 [rows], tokens; `EMPTY` and `NOT_TEXT` mark rows without a sample.
        spans: int64 [runs, 2], all rows one after the other; `span_firsts` [rows + 1] says where each begins.
        patches: int64 [parts]; `patch_firsts` as well.
    """

    lengths: Ints
    spans: Ints
    span_firsts: Ints
    patches: Ints
    patch_firsts: Ints

    def rows(self, index: int) -> RowsOfImages:
        """Of one row of the data."""
        spans = self.spans[self.span_firsts[index] : self.span_firsts[index + 1]]
        patches = self.patches[self.patch_firsts[index] : self.patch_firsts[index + 1]]
        return RowsOfImages(
            int(self.lengths[index]), tuple((a, b) for a, b in spans.tolist()), tuple(patches.tolist())
        )


class PictureRows:
    """Rows of text and images; text alone through the methods of `Documents`.

    Args:
        documents: JSON lines or parquet.
        column: key or column of the images: a path or a list of paths, relative to `base`; in parquet also
            bytes, or what Hugging Face writes (`bytes` and `path`).
        base: folder of the images.
    """

    def __init__(self, documents: Documents, column: str, base: Path) -> None:
        if not isinstance(documents, JsonLines | Parquet):
            raise DataError(
                "data with images is .jsonl or .parquet", "Give such a file, or a folder and a data.pattern."
            )
        self._documents = documents
        self._column, self._base = column, base

    @property
    def files(self) -> tuple[FileStamp, ...]:
        """Of the rows; image files are not watched."""
        return self._documents.files

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """By the reader."""
        return self._documents.skipped

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> str | None:
        return self._documents[index]

    def name(self, index: int) -> str:
        """File, and row or line."""
        return self._documents.name(index)

    def fingerprint(self) -> str:
        """Of the files and the column of images; image files and their folder are not in it."""
        return hashlib.sha256(json.dumps([self._documents.fingerprint(), self._column]).encode()).hexdigest()

    def sizes(self, index: int) -> list[tuple[int, int]]:
        """Height and width of every image of a row, from its header.

        Raises:
            DataError: one is missing, or is not an image; row and image are named.
        """
        return self._each(index, _upright_size)

    def images(self, index: int) -> list[Any]:
        """RGB images of a row, decoded; raises as `sizes` does."""
        return self._each(index, _upright)

    def _each(self, index: int, take: Callable[[Any], Taken]) -> list[Taken]:
        library = _library()
        given = self._documents.value(index, self._column)
        entries = [] if given is None else given if isinstance(given, list) else [given]
        taken = []
        for entry in entries:
            source, what = self._source(entry, self.name(index))
            try:
                with library.open(source) as image:
                    taken.append(take(image))
                    if image.mode not in _EIGHT_BIT:
                        raise DataError(
                            f"{self.name(index)}: {what} has pixels of mode {image.mode}, not of 8 bits",
                            "Scale it to 8 bits a channel; clipping would turn it white.",
                        )
            except (OSError, library.DecompressionBombError) as error:
                raise DataError(
                    f"{self.name(index)}: {what} is not a readable image ({type(error).__name__})",
                    "Paths are relative to the folder of the data. Repair the row or leave it out.",
                ) from None
        return taken

    def _source(self, entry: Any, name: str) -> tuple[Any, str]:
        """What PIL opens, and what to call it."""
        if isinstance(entry, dict):
            entry = entry.get("bytes") or entry.get("path")
        if isinstance(entry, bytes):
            return io.BytesIO(entry), "an image given as bytes"
        if isinstance(entry, str):
            return self._base / entry, str(self._base / entry)
        raise DataError(
            f"{name} holds a {type(entry).__name__} where an image belongs",
            "Give paths, bytes, or objects with `bytes` or `path` (image_column).",
        )


def _upright_size(image: Any) -> tuple[int, int]:
    """Height and width as seen: cameras write how they were held beside the pixels."""
    lying = image.getexif().get(_ORIENTATION) in _LYING
    return (image.width, image.height) if lying else (image.height, image.width)


def _upright(image: Any) -> Any:
    """In RGB, turned as `_upright_size` says (transformers' own loader does the same)."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


class PictureDataset(TextDataset):
    """Samples of text and images.

    Args:
        documents, tokenizer, form, index: what to read, how, and how long it will be.
        max_tokens, too_long, remedy: see `TextDataset`.
    """

    def __init__(
        self,
        documents: PictureRows,
        tokenizer: Tokenizer,
        form: ImageFormat,
        index: PictureIndex,
        *,
        max_tokens: int | None,
        too_long: TooLong,
        remedy: str,
    ) -> None:
        fingerprint = f"{tokenizer.fingerprint} {form.fingerprint}"
        lengths = LengthIndex(index.lengths, documents.fingerprint(), fingerprint, documents.files)
        super().__init__(
            documents, tokenizer, lengths, max_tokens=max_tokens, too_long=too_long, remedy=remedy
        )
        self._rows, self._form, self._index = documents, form, index

    def rows(self, index: int) -> RowsOfImages:
        """Where the images of a sample lie."""
        return self._index.rows(int(self._kept[index]))

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Token ids, labels (-100 for what stands for an image), and what the model wants of the images.

        Raises:
            DataError: text or images no longer have the length that the index says.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = int(self._kept[index])
        images = self._rows.images(row)
        sizes = [(image.height, image.width) for image in images]
        parts = _parts(self._rows[row] or "", self.tokenizer, self._form, sizes, self.name(index))
        ids = np.concatenate([part for part, _ in parts])
        labels = np.concatenate([part if text else np.full(len(part), IGNORE_INDEX) for part, text in parts])
        if len(ids) != self.lengths[index]:
            raise DataError(
                f"{self.name(index)} had {self.lengths[index]} tokens in the length index and now has "
                f"{len(ids)}",
                "Its text or its images changed; remove the index and start again.",
            )
        pixels = self._form.pixels(images) if images else {}
        return {"input_ids": ids, "labels": labels, **pixels}


def _parts(
    text: str, tokenizer: Tokenizer, form: ImageFormat, sizes: Sequence[tuple[int, int]], name: str
) -> list[tuple[Ints, bool]]:
    """Ids of every run of text and of every image in its frame, and whether it is text."""
    pieces = text.split(IMAGE)
    if len(pieces) != len(sizes) + 1:
        raise DataError(
            f"{name} has {len(pieces) - 1} times {IMAGE} in its text, and {len(sizes)} images",
            "Every image stands where the text says so, and in that order.",
        )
    parts: list[tuple[Ints, bool]] = []
    begin = _of_template(tokenizer)
    for number, piece in enumerate(pieces):
        if number:
            try:
                tokens = form.rule.image(*sizes[number - 1]).tokens
            except InputError as error:
                raise DataError(f"{name}: {error.cause}", error.remedy) from None
            parts.append(
                (np.array([*form.before, *[form.token] * tokens, *form.after], dtype=np.int64), False)
            )
        last = number == len(pieces) - 1
        around = (form.margin if number else "") + piece + ("" if last else form.margin)
        ids = tokenizer.encode(around).astype(np.int64)
        if number and ids[: len(begin)].tolist() == begin:
            ids = ids[len(begin) :]  # a document begins once
        if not last and len(ids) and ids[-1] == tokenizer.eos_id:
            ids = ids[:-1]  # the document goes on after the image
        if (ids == form.token).any():
            raise DataError(f"{name} has an image token in its text", f"Write {IMAGE} for an image.")
        parts.append((ids, True))
    return parts


def _of_template(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every text."""
    ids: list[int] = tokenizer.encode("").tolist()
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_id else ids


def build_picture_index(
    documents: PictureRows, tokenizer: Tokenizer, form: ImageFormat, progress: Progress
) -> PictureIndex:
    """Lengths of all rows from their text and the headers of their images.

    Raises:
        DataError: an image is missing, or text and images do not fit together; the row is named.
    """
    lengths = np.full(len(documents), NOT_TEXT, dtype=np.int64)
    spans: list[tuple[int, int]] = []
    patches: list[int] = []
    ends: list[tuple[int, int]] = [(0, 0)]
    for row in range(len(documents)):
        text = documents[row]
        if text is not None:
            found = _measure(text, documents, row, tokenizer, form) if text else RowsOfImages(EMPTY, (), ())
            lengths[row] = found.tokens
            spans += found.spans
            patches += found.patches
        ends.append((len(spans), len(patches)))
        if row % 100 == 99 or row == len(documents) - 1:
            progress(row + 1, len(documents))
    firsts = np.array(ends, dtype=np.int64)
    flat = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return PictureIndex(lengths, flat, firsts[:, 0], np.array(patches, dtype=np.int64), firsts[:, 1])


def _measure(
    text: str, documents: PictureRows, row: int, tokenizer: Tokenizer, form: ImageFormat
) -> RowsOfImages:
    sizes = documents.sizes(row)
    images = iter(sizes)
    parts: list[int | Picture] = []
    for ids, is_text in _parts(text, tokenizer, form, sizes, documents.name(row)):
        if is_text:
            parts.append(len(ids))
        else:
            parts += [len(form.before), form.rule.image(*next(images)), len(form.after)]
    return lay_out(parts)


def open_picture_index(
    documents: PictureRows, tokenizer: Tokenizer, form: ImageFormat, folder: Path, progress: Progress
) -> PictureIndex:
    """Load the index of these rows, or build it; other rows, tokens or settings have another file."""
    key = json.dumps([documents.fingerprint(), tokenizer.fingerprint, form.fingerprint])
    path = folder / f"pictures-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npz"
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            index = PictureIndex(**{name: stored[name] for name in PictureIndex.__dataclass_fields__})
        for firsts in (index.span_firsts, index.patch_firsts):
            if len(firsts) != len(documents) + 1 or any(a > b for a, b in pairwise(firsts.tolist())):
                raise ValueError("firsts")
        return index
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the length index {path} is damaged ({type(error).__name__})", "Delete the file."
        ) from None
    index = build_picture_index(documents, tokenizer, form, progress)
    _save(index, path)
    return index


def _save(index: PictureIndex, path: Path) -> None:
    """The file appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as stream:
                np.savez_compressed(stream, **vars(index))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"the length index {path} cannot be written ({error.strerror})",
            "Name a folder that can be written (index_dir).",
        ) from None


def _library() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtraError("Pillow", "train") from None
    return Image
