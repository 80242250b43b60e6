"""What a data set holds, found before anything is learned: counts, unreadable files, duplicates."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dulbe_peft.data.decoding import open_image, to_rgb
from dulbe_peft.data.images import LabelledImages, content_of, labelled_images
from dulbe_peft.utils.terminal import counted, printable

_SHOWN, _PAIRS = 20, 3  # unreadable images, or rare classes, that a message names; pairs of each kind
FEW = 4  # images of a class, below which its answers are rough
SIDE = 16  # pixels of the grey thumbnails that are compared
# Correlation of two thumbnails from which they are one picture. Of 85 million pairs of different photographs and of
# different handwritten characters none is above 0.986. A copy as JPEG of quality 50, of half the size or with a third
# more contrast is above 0.99 in 99 of 100 cases, and one that is a fifth brighter in 95.
NEAR = 0.99
_ROWS = 1024  # thumbnails that are compared with all others at once


class Found(NamedTuple):
    """An image of a data set: the name of its split, its place in it, its own name and its class's."""

    split: str
    place: int
    name: str
    label: str


class Duplicate(NamedTuple):
    """Two images, the second of which adds nothing; `how` is one of `ALIKE`."""

    first: Found
    second: Found
    how: str


class Thumbnail(NamedTuple):
    """A unit vector, (256,), whose products are correlations of pictures, or zeros; and why it is blank, or ""."""

    grey: np.ndarray
    blank: str


Thumbnails = dict[tuple[str, int], Thumbnail]  # by the name of the split and the place in it
DARK = "nearly black, as pixels of 12 bits are that stand in 16: scale them"
FLAT = "of one flat colour"
SAME = "the same picture as another one, in another file"

# How two images are alike: by content, by pixels alone, as where a program wrote a tag into one, or nearly.
ALIKE = ("the same file", "the same pixels in another file", "nearly the same picture")
# Kinds of duplicates, the worst first.
_KINDS: dict[str, Callable[[Duplicate], bool]] = {
    "both learned from and tested on, so the accuracy says too much": lambda row: row.first.split != row.second.split,
    "in two classes": lambda row: row.first.split == row.second.split and row.first.label != row.second.label,
    "twice in a class": lambda row: row.first.split == row.second.split and row.first.label == row.second.label,
}


@dataclass(frozen=True)
class Inventory:
    """Images by class and split, and all that is not as it should be."""

    counts: dict[str, dict[str, int]]  # split -> class -> images; `inspect_images` includes the unreadable ones
    unreadable: list[tuple[Found, str]] = field(default_factory=list)  # with the reasons
    left_out: list[tuple[str, str]] = field(default_factory=list)  # files and folders, and reasons
    duplicates: list[Duplicate] = field(default_factory=list)  # where they were looked for
    notes: list[str] = field(default_factory=list)  # sentences about what was guessed
    blank: list[str] = field(default_factory=list)  # sentences about images that show next to nothing, or one picture

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
        counts = self.counts.values()
        rows: list[tuple[Any, ...]] = [("class", *self.counts)]
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

    def problems(self, most: int = _SHOWN) -> list[str]:
        """What is left out and why, cannot be read (`most` of them), is rare, or there twice."""
        lines = []
        if self.left_out:
            counts, first = Counter(why for _, why in self.left_out), {w: path for path, w in reversed(self.left_out)}
            lines += ["", f"left out: {len(self.left_out)}"]
            lines += [f"  {n:>6}  {why}, such as {printable(first[why])}" for why, n in counts.most_common()]
        if self.unreadable:
            lines += ["", f"cannot be read: {len(self.unreadable)}", *self.unreadable_lines(most)]
        for said in (self.notes, self.blank):
            lines += ["", *map(printable, said)] if said else []
        for split, own in list(self.counts.items())[:1]:
            rare = [f"{printable(name)} ({count})" for name, count in own.items() if count < FEW]
            if rare:
                lines += ["", f"fewer than {FEW} images in {split}: {', '.join(_first(rare, _SHOWN))}"]
        for what, holds in _KINDS.items():
            for how in ALIKE:
                found = [row for row in self.duplicates if row.how == how and holds(row)]
                both = [[printable(f"{one.split}: {one.name}") for one in row[:2]] for row in found]
                if found:
                    lines += ["", f"{how} {what}: {counted(len(found), 'pair')}"]
                    lines += [f"  {line}" for line in _first(list(map("  =  ".join, both)), _PAIRS)]
        return lines

    def unreadable_lines(self, most: int = _SHOWN) -> list[str]:
        """The first images that cannot be read, one a line with its reason, and how many more there are."""
        lines = [f"{printable(image.name)}: {why}" for image, why in self.unreadable]
        return [f"  {line}" for line in _first(lines, most)]


def _first(texts: list[str], most: int) -> list[str]:
    return texts[:most] + [f"... and {len(texts) - most} more"] * (len(texts) > most)


def undecodable(images: LabelledImages) -> dict[int, str]:
    """Index -> reason of the stored images that cannot be decoded."""

    def problem(index: int) -> str | None:
        try:
            images.image(index)
        except Exception as error:  # also of a damaged table, whatever its library raises
            return str(error)
        return None

    with ThreadPoolExecutor() as pool:  # decoders work without Python's lock, and disks are waited for
        found = enumerate(pool.map(problem, range(len(images))))
        return {index: why for index, why in found if why is not None}


Look = Callable[[LabelledImages], Mapping[int, str]]  # index -> why an image cannot be read


def inspect_images(dataset: Any, split: str | None = None) -> Inventory:
    """Count a data set's images, and decode all of them to find those that cannot be read.

    Args:
        dataset: any that can be learned from. Images that have no file, as in a list of tensors, are not looked at.
        split: what the table calls the data set; None: its own `split`, or "images".

    Raises:
        TypeError: `dataset` is no data set.
        ValueError: its labels are wrong.
    """
    images = labelled_images(dataset)
    return inspect_parts({split or images.split or "images": images})


def inspect_parts(
    parts: Mapping[str, LabelledImages], look: Look = undecodable, left_out: Sequence[tuple[str, str]] = ()
) -> Inventory:
    """The inventory of the splits of a data set; `left_out` beside what each of them leaves out."""
    every = [*left_out, *(row for images in parts.values() for row in images.left_out)]
    found = Inventory(count_images(parts), left_out=list(dict.fromkeys(every)))
    for split, images in parts.items():
        problems = look(images) if images.stored else {}
        found.unreadable.extend((_found(split, images, index), problems[index]) for index in sorted(problems))
    return found


def count_images(parts: Mapping[str, LabelledImages]) -> dict[str, dict[str, int]]:
    """Split -> class name, or label where there is none -> number of images."""
    counts = {}
    for split, images in parts.items():
        names = images.class_names or tuple(map(str, range(int(images.labels.max(initial=-1)) + 1)))
        counts[split] = dict(zip(names, np.bincount(images.labels, minlength=len(names)).tolist()))
    return counts


def find_duplicates(parts: Mapping[str, LabelledImages], pictures: Thumbnails | None = None) -> list[Duplicate]:
    """The pairs of images of the same content, also across splits; with the `pictures` of all, also near ones."""
    places = [(split, part, index) for split, part in parts.items() for index in range(len(part))]
    first, pairs = dict[bytes, int](), dict[tuple[int, int], str]()
    for place, content in enumerate(content for part in parts.values() for content in part.contents()):
        # The inventory says why an image without a content cannot be read.
        if content is not None and first.setdefault(content, place) != place:
            pairs[first[content], place] = ALIKE[0]
    stored = [place for place, (split, _, index) in enumerate(places) if (split, index) in (pictures or {})]
    greys = [(pictures or {})[places[place][0], places[place][2]].grey for place in stored]
    for pair in _alike(stored, np.array(greys)):
        one, other = (content_of(part.image(index)) for _, part, index in (places[place] for place in pair))
        pairs.setdefault(pair, ALIKE[1] if one == other else ALIKE[2])
    return [Duplicate(_found(*places[a]), _found(*places[b]), how) for (a, b), how in sorted(pairs.items())]


def _found(split: str, images: LabelledImages, index: int) -> Found:
    label = images.labels[index]
    name = images.class_names[label] if images.class_names else str(label)
    return Found(split, index, images.item_name(index), name)


def thumbnail(images: LabelledImages, index: int) -> Thumbnail:
    """An image as 16 x 16 grey pixels; nothing of one that cannot be read."""
    nothing = np.zeros(SIDE * SIDE, dtype=np.float32)
    try:
        with open_image(images.given(index)) as opened:
            opened.draft("L", (4 * SIDE, 4 * SIDE))  # a JPEG is decoded at a fraction of its size
            grey = to_rgb(opened).convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    except Exception:  # Pillow's decoders raise almost anything on damaged files
        return Thumbnail(nothing, "")
    pixels = np.asarray(grey, dtype=np.float32).ravel()
    centred = pixels - pixels.mean()
    length = np.linalg.norm(centred)
    blank = DARK if pixels.max() < 16 else FLAT if np.ptp(pixels) <= 1 else ""
    return Thumbnail(centred / length if length > SIDE else nothing, blank)  # a blank area is like every other one


def thumbnails(parts: Mapping[str, LabelledImages], most: int | None = None) -> Thumbnails:
    """The thumbnails of all stored images, or of `most` of them from everywhere, by split and index."""
    places = [(split, index) for split, part in parts.items() if part.stored for index in range(len(part))]
    if most is not None and len(places) > most:
        places = [places[at] for at in np.linspace(0, len(places) - 1, most, dtype=int)]
    with ThreadPoolExecutor() as pool:
        return dict(zip(places, pool.map(lambda place: thumbnail(parts[place[0]], place[1]), places), strict=True))


def blank_lines(parts: Mapping[str, LabelledImages], pictures: Thumbnails, least: int = 1) -> list[str]:
    """Sentences about images that show next to nothing, or all the same, where they are `least` or more."""
    kinds: dict[str, list[str]] = {}
    seen = dict[bytes, bytes | None]()
    for (split, index), (grey, blank) in pictures.items():
        part = parts[split]
        if not blank and least > 1 and grey.any():  # else `find_duplicates` says it
            (content,) = part.at([index]).contents()
            blank = SAME if seen.setdefault(grey.tobytes(), content) != content else ""
        kinds.setdefault(blank, []).append(part.item_name(index))
    kinds.pop("", None)
    of = f"{len(pictures)} of the images were looked at; " if least > 1 else ""
    return [f"{of}{len(n)} are {why}, such as {printable(n[0])}" for why, n in kinds.items() if len(n) >= least]


def _alike(places: Sequence[int], thumbnails: np.ndarray) -> Iterator[tuple[int, int]]:
    """Each place with the first one whose thumbnail, of (n, 256), is nearly the same."""
    for start in range(0, len(places), _ROWS):
        close = np.triu(thumbnails[start : start + _ROWS] @ thumbnails[start:].T > NEAR, 1)
        firsts = {int(b): int(a) for a, b in np.argwhere(close)[::-1]}
        yield from ((places[start + a], places[start + b]) for b, a in firsts.items())
