"""Take stock of a data set before training: the counts of its images, and the problems that were found."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dulbe_peft.utils.terminal import counted, printable

_SHOWN, _PAIRS = 20, 3  # how many unreadable images or rare classes, and pairs of each kind, a message lists
FEW = 4  # a class with fewer images is predicted poorly


class Found(NamedTuple):
    """An image of a data set: its split, its index in the split, its name and the name of its class."""

    split: str
    place: int
    name: str
    label: str


class Duplicate(NamedTuple):
    """Two images of which the second adds nothing to the first; `how` is one of `ALIKE`."""

    first: Found
    second: Found
    how: str


class Picture(NamedTuple):
    """What was seen of an image: its grey pixels as a unit vector, why it is blank, and its width and height.

    `grey` is float32 of shape (256,); the product of two of them is the correlation of the pictures. Unreadable and
    nearly blank images have zeros. `blank` is "" for an image that shows something.
    """

    grey: np.ndarray
    blank: str
    size: tuple[int, int]


Pictures = dict[tuple[str, int], Picture]  # (name of the split, index in the split) -> picture
# How two images are alike. Two files have the same pixels if, for example, a program wrote a tag into one of them.
ALIKE = ("the same file", "the same pixels in another file", "nearly the same picture")
# The kinds of duplicates, from the most to the least harmful.
_KINDS: dict[str, Callable[[Duplicate], bool]] = {
    "in training and test images, so the accuracy is too optimistic": lambda row: row.first.split != row.second.split,
    "in two classes": lambda row: row.first.split == row.second.split and row.first.label != row.second.label,
    "twice in a class": lambda row: row.first.split == row.second.split and row.first.label == row.second.label,
}


@dataclass(frozen=True)
class Inventory:
    """The number of images by split and class, and the problems that were found."""

    counts: dict[str, dict[str, int]]  # split -> class -> number; `inspect_images` counts unreadable images too
    unreadable: list[tuple[Found, str]] = field(default_factory=list)  # (image, reason)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # (file or folder, reason)
    duplicates: list[Duplicate] = field(default_factory=list)  # empty unless they were searched for
    notes: list[str] = field(default_factory=list)  # sentences that report what was guessed
    blank: list[str] = field(default_factory=list)  # sentences about blank images and repeated pictures
    group_names: dict[int, str] = field(default_factory=dict)  # number in `LabelledImages.groups` -> name
    single: list[str] = field(default_factory=list)  # classes whose images are all in one group
    pictures: Pictures = field(default_factory=dict)  # what was seen of the images whose pictures were compared

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes of all splits, in the order in which they first appear."""
        return tuple(dict.fromkeys(name for counts in self.counts.values() for name in counts))

    def summary(self) -> str:
        """Return one line with the numbers of classes, of images per split, and of files left out or unreadable."""
        parts = [f"{sum(counts.values())} in {split}" for split, counts in self.counts.items()]
        line = f"{counted(len(self.class_names), 'class')}; images: {', '.join(parts)}"
        if self.left_out:
            line += f"; left out: {len(self.left_out)}"
        if self.unreadable:
            line += f"; cannot be read: {len(self.unreadable)}"
        return line

    def format(self, most: int = 40) -> str:
        """Return a table of the counts, with at most `most` classes and the total, followed by the problems."""
        names = self.class_names
        counts = self.counts.values()
        rows: list[tuple[object, ...]] = [("class", *self.counts)]
        rows += [(printable(name), *(c.get(name, 0) for c in counts)) for name in names[:most]]
        if len(names) > most:
            rows.append((f"... and {len(names) - most} more", *("" for _ in counts)))
        rows.append((counted(len(names), "class"), *(sum(c.values()) for c in counts)))
        first, *widths = (max(len(str(cell)) for cell in column) for column in zip(*rows))
        lines = [
            f"{name:<{first}}" + "".join(f"  {cell:>{max(width, 6)}}" for cell, width in zip(cells, widths))
            for name, *cells in rows
        ]
        return "\n".join(lines + self.problems())

    def problems(self, most: int = _SHOWN, known: Collection[str] = ()) -> list[str]:
        """Return lines on duplicates, unreadable images (at most `most`), files left out, guesses and rare classes.

        What harms most comes first: images that are in the training and in the test images. Nothing is said about
        classes in `known` that are rare, or in one group, here.
        """
        lines = []
        for kind, is_of_kind in _KINDS.items():
            for how in ALIKE:
                pairs = [row[:2] for row in self.duplicates if row.how == how and is_of_kind(row)]
                texts = ["  =  ".join(printable(f"{image.split}: {image.name}") for image in pair) for pair in pairs]
                if pairs:
                    lines += ["", f"{how} {kind}: {counted(len(pairs), 'pair')}"]
                    lines += [f"  {line}" for line in _shorten(texts, _PAIRS)]
        if self.unreadable:
            lines += ["", f"cannot be read: {len(self.unreadable)}", *self.unreadable_lines(most)]
        if self.left_out:
            numbers = Counter(why for _, why in self.left_out)
            examples = {why: path for path, why in reversed(self.left_out)}
            lines += ["", f"left out: {len(self.left_out)}"]
            lines += [f"  {n:>6}  {why}, such as {printable(examples[why])}" for why, n in numbers.most_common()]
        notes = [*self.notes]
        if single := [name for name in self.single if name not in known]:
            notes.append(
                f"all training images of {counted(len(single), 'class')} are in one group, such as "
                f"{printable(single[0])!r}: for estimates, that is like a single image"
            )
        for sentences in (notes, self.blank):
            lines += ["", *map(printable, sentences)] if sentences else []
        for split, counts in list(self.counts.items())[:1]:
            rare = [
                f"{printable(name)} ({count})" for name, count in counts.items() if count < FEW and name not in known
            ]
            if rare:
                lines += ["", f"fewer than {FEW} images in {split}: {', '.join(_shorten(rare, _SHOWN))}"]
        return lines

    def lines(self, known: Collection[str] = ()) -> list[str]:
        """Return all lines on problems without their layout, for the page of a run; `known` is as for `problems`."""
        return [line.strip() for line in self.problems(len(self.unreadable), known) if line]

    def unreadable_lines(self, most: int = _SHOWN) -> list[str]:
        """Return a line with the reason for each of the first `most` unreadable images, and the number of others."""
        lines = [f"{printable(image.name)}: {why}" for image, why in self.unreadable]
        return [f"  {line}" for line in _shorten(lines, most)]


def _shorten(texts: list[str], most: int) -> list[str]:
    return texts[:most] + [f"... and {len(texts) - most} more"] * (len(texts) > most)
