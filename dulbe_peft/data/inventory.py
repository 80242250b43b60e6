"""What a data set holds, found before anything is learned: counts, unreadable files, duplicates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dulbe_peft.data.decoding import image_problem
from dulbe_peft.data.duplicates import Duplicate
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.utils.terminal import printable

_FIRST, _SLOW, _THREADS = 100, 1e-3, 16
_SHOWN, _PAIRS = 20, 3  # unreadable images, or rare classes, that a message names; pairs of each kind
FEW = 4  # images of a class, below which its answers are rough


# Kinds of duplicates, the worst first.
_KINDS: dict[str, Callable[[Duplicate], bool]] = {
    "both learned from and tested on, so the accuracy says too much": lambda row: row.splits[0] != row.splits[1],
    "in two classes": lambda row: row.splits[0] == row.splits[1] and row.classes[0] != row.classes[1],
    "twice in a class": lambda row: row.splits[0] == row.splits[1] and row.classes[0] == row.classes[1],
}


@dataclass(frozen=True)
class Inventory:
    """Images by class and split, and all that is not as it should be.

    Attributes:
        counts: split -> class name -> number of images; `inspect_images` includes the unreadable ones.
        unreadable: (name, reason) of images whose header or length is wrong.
        left_out: (path, reason) of files and folders that are no part of the data.
        unchecked: number of images that have no file whose header could be read, as in a list of tensors.
        positions: split -> positions of the unreadable images in that data set.
        duplicates: pairs of equal images, where they were looked for.

    Example:
        >>> found = inspect_images(ImageFolder("photos", "train"))
        >>> print(found.format())
        class        train
        cat             70
        dog             50
        2 classes      120
    """

    counts: dict[str, dict[str, int]]
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    unchecked: int = 0
    positions: dict[str, list[int]] = field(default_factory=dict)
    duplicates: list[Duplicate] = field(default_factory=list)

    def __add__(self, other: Inventory) -> Inventory:
        """The inventory of two splits."""
        return Inventory(
            self.counts | other.counts,
            self.unreadable + other.unreadable,
            list(dict.fromkeys(self.left_out + other.left_out)),
            self.unchecked + other.unchecked,
            self.positions | other.positions,
            self.duplicates + other.duplicates,
        )

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of all splits, in their order."""
        return tuple(dict.fromkeys(name for counts in self.counts.values() for name in counts))

    def summary(self) -> str:
        """One line: classes, images of each split, and how many files are left out or cannot be read."""
        parts = [f"{sum(counts.values())} in {split}" for split, counts in self.counts.items()]
        line = f"{counted(len(self.class_names), 'class')}; images: {', '.join(parts)}"
        if self.left_out:
            line += f"; left out: {len(self.left_out)}"
        if self.unreadable:
            line += f"; cannot be read: {len(self.unreadable)}"
        return line

    def format(self, most: int = 40) -> str:
        """A table of the first classes and of all, then all problems."""
        names = self.class_names
        rows = [("class", *self.counts)]
        rows += [
            (printable(name), *(str(counts.get(name, 0)) for counts in self.counts.values())) for name in names[:most]
        ]
        if len(names) > most:
            rows.append((f"... and {len(names) - most} more", *("" for _ in self.counts)))
        totals = (str(sum(counts.values())) for counts in self.counts.values())
        rows.append((counted(len(names), "class"), *totals))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            row[0].ljust(widths[0]) + "".join(f"  {cell:>{max(width, 6)}}" for cell, width in zip(row[1:], widths[1:]))
            for row in rows
        ]
        return "\n".join(lines + self.problems())

    def problems(self) -> list[str]:
        """What is left out and why, was not looked at, cannot be read, is rare, or is there twice."""
        lines = []
        if self.left_out:
            paths: dict[str, list[str]] = {}
            for path, why in self.left_out:
                paths.setdefault(why, []).append(path)
            reasons = sorted(paths.items(), key=lambda row: -len(row[1]))
            lines += ["", f"left out: {len(self.left_out)}"]
            lines += [f"  {len(rows):>6}  {why}, such as {printable(rows[0])}" for why, rows in reasons]
        if self.unchecked:
            lines += ["", f"not looked at before training: {counted(self.unchecked, 'image')} without a file"]
        if self.unreadable:
            lines += ["", f"cannot be read: {len(self.unreadable)}", *unreadable_lines(self.unreadable)]
        for split, counts in list(self.counts.items())[:1]:
            rare = [f"{printable(name)} ({count})" for name, count in counts.items() if count < FEW]
            if rare:
                lines += ["", f"fewer than {FEW} images in {split}: {', '.join(_first(rare, _SHOWN))}"]
        for what, holds in _KINDS.items():
            for exact, how in ((True, "the same file"), (False, "nearly the same picture")):
                found = [row for row in self.duplicates if row.exact == exact and holds(row)]
                both = [map(printable, map(": ".join, zip(row.splits, row.names))) for row in found]
                if found:
                    lines += ["", f"{how} {what}: {counted(len(found), 'pair')}"]
                    lines += [f"  {line}" for line in _first(list(map("  =  ".join, both)), _PAIRS)]
        return lines


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where there is not one."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def unreadable_lines(unreadable: Sequence[tuple[str, str]]) -> list[str]:
    """The first unreadable images, one a line with its reason, and how many more there are."""
    return [f"  {line}" for line in _first([f"{printable(name)}: {why}" for name, why in unreadable], _SHOWN)]


def _first(texts: list[str], most: int) -> list[str]:
    return texts[:most] + [f"... and {len(texts) - most} more"] * (len(texts) > most)


def inspect_images(dataset: Any, split: str | None = None, in_full: bool = False) -> Inventory:
    """Count a data set's images and read the header of each, which costs about a hundredth of decoding them.

    A header shows whether a file is an image, of a format that is read, and not too large. A file that does not end
    as its format demands is decoded to be sure. Damage in the middle of a file stays unseen until it is decoded.

    Args:
        dataset: any that can be learned from. Images that have no file, as in a list of tensors, are not looked at.
        split: what the table calls the data set; None: its own `split`, or "images".
        in_full: decode every image, which finds damage in the middle, too.

    Raises:
        TypeError: `dataset` is no data set.
        ValueError: its labels are wrong.
    """
    images = labelled_images(dataset)
    names = images.class_names or tuple(map(str, range(int(images.labels.max(initial=-1)) + 1)))
    title = split or images.split or "images"
    per_class = np.bincount(images.labels, minlength=len(names))
    counts = {title: {name: int(count) for name, count in zip(names, per_class)}}
    left_out = list(images.left_out)
    if not images.stored:
        return Inventory(counts, left_out=left_out, unchecked=len(images))
    problems = enumerate(_problems(images, in_full))
    bad = {index: problem for index, problem in problems if problem is not None}
    unreadable = [(images.item_name(index), problem) for index, problem in bad.items()]
    return Inventory(counts, unreadable, left_out, positions={title: list(bad)})


def readable_images(dataset: LabelledImages) -> tuple[LabelledImages, Inventory]:
    """The images that can be decoded, and what was found."""
    found = inspect_images(dataset, in_full=True)
    bad = [position for positions in found.positions.values() for position in positions]
    return dataset.at(np.setdiff1d(np.arange(len(dataset)), bad)), found


def _problems(images: LabelledImages, in_full: bool) -> list[str | None]:
    """Why each image cannot be read, or None."""

    def problem(index: int) -> str | None:
        try:
            file: Any = images.file(index)
        except Exception as error:  # a damaged table, whatever its library raises
            return str(error)
        return image_problem(file, in_full)

    started, first = time.perf_counter(), range(min(_FIRST, len(images)))
    found = [problem(index) for index in first]
    # On a slow disk or network most of the time is waiting. Where files come at once, threads would only wait for
    # Python's lock: measured, three times slower.
    slow = time.perf_counter() - started > _SLOW * len(first)
    with ThreadPoolExecutor(_THREADS if slow else 1) as pool:
        return [*found, *pool.map(problem, range(len(first), len(images)))]
