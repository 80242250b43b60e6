"""Images that a data set holds twice, within a split or in two: the same file, or nearly the same picture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dulbe_peft.data.decoding import open_image, to_rgb
from dulbe_peft.data.images import LabelledImages

SIDE = 16  # pixels of the grey thumbnails that are compared
# Correlation of two thumbnails from which they are one picture. Of 85 million pairs of different photographs and of
# different handwritten characters none is above 0.986. A copy as JPEG of quality 50, of half the size or with a third
# more contrast is above 0.99 in 99 of 100 cases, and one that is a fifth brighter in 95.
NEAR = 0.99
_ROWS = 1024  # thumbnails that are compared with all others at once


@dataclass(frozen=True)
class Duplicate:
    """Two images, the second of which adds nothing; `exact` where their files are equal."""

    names: tuple[str, str]
    splits: tuple[str, str]
    classes: tuple[str, str]
    places: tuple[int, int]  # in their splits
    exact: bool


@dataclass(frozen=True)
class _Stored:
    """An image in a file, and its place in its split."""

    images: LabelledImages
    split: str
    place: int

    def file(self) -> Any:
        return self.images.file(self.place)

    def facts(self) -> tuple[str, str, str, int]:
        label = int(self.images.labels[self.place])
        name = self.images.class_names[label] if self.images.class_names else str(label)
        return self.images.item_name(self.place), self.split, name, self.place


def find_duplicates(parts: Mapping[str, LabelledImages], near: bool = False) -> list[Duplicate]:
    """The pairs of equal images within and across splits; with `near`, which decodes all, also nearly equal ones."""
    stored = [_Stored(part, split, i) for split, part in parts.items() if part.stored for i in range(len(part))]
    pairs = dict.fromkeys(_equal(stored), True)
    if near:
        pairs |= {pair: False for pair in _alike(stored) if pair not in pairs}
    found = []
    for (a, b), exact in sorted(pairs.items()):
        facts: Any = zip(stored[a].facts(), stored[b].facts(), strict=True)
        names, splits, classes, places = facts
        found.append(Duplicate(names, splits, classes, places, exact))
    return found


def _equal(stored: list[_Stored]) -> Iterator[tuple[int, int]]:
    """Each place with the first one that has the same content; files of different sizes are not read."""
    for same_size in _groups(range(len(stored)), lambda place: _size(stored[place].file())):
        for same in _groups(same_size, lambda place: _digest(stored[place].file())):
            yield from ((same[0], other) for other in same[1:])


def _groups(places: Any, key: Callable[[int], Any]) -> list[list[int]]:
    """The places of equal keys, where there are several; a place that cannot be read has no key."""
    found: dict[Any, list[int]] = {}
    for place in places:
        try:
            found.setdefault(key(place), []).append(place)
        except (OSError, ValueError):  # the inventory says why
            continue
    return [group for value, group in found.items() if len(group) > 1 and value is not None]


def _size(file: Any) -> int | None:
    if isinstance(file, Path):
        return os.path.getsize(file)
    return None if file is None else file.seek(0, os.SEEK_END)


def _digest(file: Any) -> str:
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def _alike(stored: list[_Stored]) -> Iterator[tuple[int, int]]:
    """Each place with the first one of which the thumbnail is nearly the same."""
    thumbnails = np.zeros((len(stored), SIDE * SIDE), dtype=np.float32)
    for place, image in enumerate(stored):
        try:
            with open_image(image.file()) as opened:
                opened.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is decoded at a fraction of its size
                grey = to_rgb(opened).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
        except Exception:
            continue
        pixels = np.asarray(grey, dtype=np.float32).ravel()
        centred = pixels - pixels.mean()
        length = np.linalg.norm(centred)
        if length > SIDE:  # else a blank area, which is like every other one
            thumbnails[place] = centred / length
    for start in range(0, len(stored), _ROWS):
        rows = thumbnails[start : start + _ROWS]
        close = np.triu(rows @ thumbnails[start:].T > NEAR, 1)
        firsts = {int(b): int(a) for a, b in np.argwhere(close)[::-1]}
        yield from ((start + a, start + b) for b, a in firsts.items())
