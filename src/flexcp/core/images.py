"""How many tokens and patches an image or a video gives, and where they lie in a sample: from sizes alone.

A planner must know lengths before anything is decoded. The size of an image stands in its header, and what a
processor makes of it is arithmetic; the tests hold it to the processors of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flexcp.core.errors import InputError

Settings = Mapping[str, Any]

_MOST_STRETCHED = 200  # longer side over shorter; the processors refuse more


@dataclass(frozen=True, slots=True)
class Picture:
    """An image or a video, as a model sees it.

    Attributes:
        runs: tokens of each run of image tokens: one for an image, one a frame (pair) for a video.
        patches: of each part that the encoder sees as a whole, before patches are merged into tokens.
        between: text tokens between two runs, such as time stamps.
    """

    runs: tuple[int, ...]
    patches: tuple[int, ...]
    between: int = 0

    @property
    def tokens(self) -> int:
        """Image tokens, and the text between them."""
        return sum(self.runs) + self.between * (len(self.runs) - 1)


@dataclass(frozen=True, slots=True)
class RowsOfImages:
    """A sample of text and pictures, row by row.

    Attributes:
        tokens: its length.
        spans: half-open row ranges of image tokens.
        patches: of each part that the encoder sees as a whole.
    """

    tokens: int
    spans: tuple[tuple[int, int], ...]
    patches: tuple[int, ...]


class ImageRule(Protocol):
    """What a processor makes of an image of some size."""

    def image(self, height: int, width: int) -> Picture:
        """Of an image of so many pixels."""
        ...


def lay_out(parts: Iterable[int | Picture]) -> RowsOfImages:
    """Rows of a sample from its parts in order: a number of text tokens, or a picture.

    >>> lay_out([3, Picture((4, 4), (16, 16), between=2), 5])
    RowsOfImages(tokens=18, spans=((3, 7), (9, 13)), patches=(16, 16))
    """
    row, spans, patches = 0, list[tuple[int, int]](), list[int]()
    for part in parts:
        if isinstance(part, int):
            row += part
            continue
        for number, tokens in enumerate(part.runs):
            row += part.between if number else 0
            if spans and spans[-1][1] == row:  # no text between them: one run to the model
                spans[-1] = (spans[-1][0], row + tokens)
            else:
                spans.append((row, row + tokens))
            row += tokens
        patches += part.patches
    return RowsOfImages(row, tuple(spans), tuple(patches))


@dataclass(frozen=True, slots=True)
class SmartResize:
    """Qwen-VL: sides become multiples of a merged patch, and the area stays within bounds.

    Attributes:
        patch, merge: pixels of a patch's side; patches of a merged token's side.
        least_pixels, most_pixels: of an image (`size.shortest_edge` and `longest_edge` of its processor).
        frames_per_patch: frames of a video that are one patch deep.
        least_video_pixels, most_video_pixels: of all frames of a video together.
        frame_tokens: most tokens of a frame of a video, if the processor has `cap_pixels_per_frame`.
        between: text tokens between the frames of a video: time stamp, start and end.

    >>> SmartResize().image(1000, 700)
    Picture(runs=(682,), patches=(2728,), between=0)
    >>> len(SmartResize().video(30, 360, 640).runs)
    15
    """

    patch: int = 16
    merge: int = 2
    least_pixels: int = 65_536
    most_pixels: int = 16_777_216
    frames_per_patch: int = 2
    least_video_pixels: int = 4_096
    most_video_pixels: int = 25_165_824
    frame_tokens: int | None = None
    between: int = 0

    @classmethod
    def from_settings(cls, image: Settings, video: Settings | None = None, between: int = 0) -> SmartResize:
        """From `preprocessor_config.json` and, for videos, `video_preprocessor_config.json`."""
        least, most = _edges(image)
        rule = cls(image["patch_size"], image["merge_size"], least, most, image["temporal_patch_size"])
        if video:
            least, most = _edges(video)
            cap = video.get("max_video_tokens", 768) if video.get("cap_pixels_per_frame") else None
            rule = replace(rule, least_video_pixels=least, most_video_pixels=most, frame_tokens=cap)
        return replace(rule, between=between)

    def image(self, height: int, width: int) -> Picture:
        """One run."""
        _check_size(height, width)
        patches = self._patches(height, width, 1, 1, self.least_pixels, self.most_pixels)
        return Picture((patches // self.merge**2,), (patches,))

    def video(self, frames: int, height: int, width: int) -> Picture:
        """One run for every `frames_per_patch` of the frames that are left after sampling.

        Raises:
            InputError: fewer frames than that, or a size that no processor takes.
        """
        deep, factor = self.frames_per_patch, self.patch * self.merge
        if frames < deep:
            raise InputError(f"a video has {frames} frames", f"Give at least {deep}.")
        if min(height, width) < factor:
            scale = max(factor / max(1, height), factor / max(1, width))
            height, width = int(height * scale), int(width * scale)
        _check_size(height, width)
        least, most = self.least_video_pixels, self.most_video_pixels
        if self.frame_tokens is not None:
            most = frames * max(min(self.frame_tokens * factor**2, most // frames), int(least * 1.05))
        counted = round(frames / deep) * deep  # as the processor counts: half to even
        patches = self._patches(height, width, frames, counted, least, most)
        runs = -(-frames // deep)  # the last frame is repeated
        return Picture((patches // self.merge**2,) * runs, (patches,) * runs, self.between)

    def _patches(self, height: int, width: int, frames: int, counted: int, least: int, most: int) -> int:
        """Patches of one frame after resizing."""
        factor = self.patch * self.merge
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if counted * high * wide > most:
            shrink = math.sqrt(frames * height * width / most)
            high, wide = (max(factor, math.floor(x / shrink / factor) * factor) for x in (height, width))
        elif counted * high * wide < least:
            grow = math.sqrt(least / (frames * height * width))
            high, wide = (math.ceil(x * grow / factor) * factor for x in (height, width))
        return high * wide // self.patch**2


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Gemma 3: every image has one size; what pan and scan cuts out counts as further images.

    Attributes:
        side, patch: pixels of the side of the image and of a patch.
        tokens: image tokens of an image.

    >>> FixedSize().image(480, 640)
    Picture(runs=(256,), patches=(4096,), between=0)
    """

    side: int = 896
    patch: int = 14
    tokens: int = 256

    def image(self, height: int, width: int) -> Picture:
        """One run, whatever the size."""
        _check_size(height, width)
        return Picture((self.tokens,), ((self.side // self.patch) ** 2,))


@dataclass(frozen=True, slots=True)
class Tiles:
    """InternVL: an image becomes tiles of one size, in the arrangement nearest to its shape, and a thumbnail.

    Attributes:
        side, patch: pixels of the side of a tile and of a patch.
        tokens: image tokens of a tile.
        least, most: tiles of an image; `most` of 1 leaves images whole (`crop_to_patches` is false).

    >>> Tiles(most=12).image(600, 1200).runs, len(Tiles(most=12).image(600, 1200).patches)
    ((768,), 3)
    """

    side: int = 448
    patch: int = 14
    tokens: int = 256
    least: int = 1
    most: int = 1

    def image(self, height: int, width: int) -> Picture:
        """One run of all tiles; a video is one such image a frame."""
        _check_size(height, width)
        tiles = self._arrangement(height, width) if self.most > 1 else 1
        tiles += tiles > 1  # the thumbnail
        return Picture((tiles * self.tokens,), ((self.side // self.patch) ** 2,) * tiles)

    def _arrangement(self, height: int, width: int) -> int:
        """Tiles of the arrangement nearest in shape; of equals the larger, if the image fills it."""
        shapes = [
            (columns, rows)
            for columns in range(1, self.most + 1)
            for rows in range(1, self.most + 1)
            if self.least <= columns * rows <= self.most
        ]
        best, nearest = 1, math.inf
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            far = abs(width / height - columns / rows)
            filled = width * height > 0.5 * self.side**2 * columns * rows
            if far < nearest or (far == nearest and filled):
                best, nearest = columns * rows, far
        return best


def _edges(settings: Settings) -> tuple[int, int]:
    """Least and most pixels, by either name that processors use."""
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge")
    most = settings.get("max_pixels") or size.get("longest_edge")
    if not least or not most:
        raise InputError(
            "the settings of the processor name no bounds of the image's area",
            "They are min_pixels and max_pixels, or size.shortest_edge and size.longest_edge.",
        )
    return int(least), int(most)


def _check_size(height: int, width: int) -> None:
    if min(height, width) < 1 or max(height, width) > _MOST_STRETCHED * min(height, width):
        raise InputError(
            f"an image has {height} x {width} pixels",
            f"Sides are at least 1, and the longer at most {_MOST_STRETCHED} times the shorter.",
        )
