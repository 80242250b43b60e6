"""The images of an opened source, and its steps: leave out, group, hold out, compare, rename and draw images.

Images are held out and drawn by their content. Groups are images that belong together, such as the frames of one
animal or one burst, as --group names them.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from dulbe_peft.data.columns import NO_VALUE, clock
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.photos.data.inventory import Inventory
from dulbe_peft.photos.data.looking import (
    SAMPLE,
    Look,
    blank_lines,
    count_images,
    find_duplicates,
    look_at,
    times_taken,
    unreadable,
)
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.terminal import counted, printable

Parts = Mapping[str, LabelledImages]  # the images of one split or two; the training split comes first


class Opened(NamedTuple):
    """The training images, the test images or None, and the inventory of both; each step returns a changed one."""

    train: LabelledImages
    test: LabelledImages | None
    inventory: Inventory  # of the images before any were drawn

    @classmethod
    def of(cls, parts: Parts, left_out: Sequence[tuple[str, str]] = (), notes: Sequence[str] = ()) -> "Opened":
        """Return the images of one or two splits, with the files that were left out and notes on guesses."""
        skipped = [*left_out, *(row for images in parts.values() for row in images.left_out)]
        inventory = Inventory(count_images(parts), left_out=list(dict.fromkeys(skipped)), notes=[*notes])
        train, *tests = parts.values()
        return cls(train, tests[0] if tests else None, inventory)

    @property
    def parts(self) -> dict[str, LabelledImages]:
        """The images by the names of their splits."""
        both = zip(self.inventory.counts, (self.train, self.test), strict=False)
        return {split: images for split, images in both if images is not None}

    def _with(self, parts: Parts, **found: Any) -> "Opened":
        train, *tests = parts.values()
        return Opened(train, tests[0] if tests else None, replace(self.inventory, **found))

    def readable(self, name: str, strict: bool, look: Look | None = None) -> "Opened":
        """Leave out unreadable images, see `looking.unreadable`; if `strict`, an error calls the data `name`."""
        problems = unreadable(self.parts, look)
        opened = self._with(self.parts, unreadable=problems)
        if problems and strict:
            first = f"{len(problems)} of the images in {name} cannot be read:"
            advice = "repair or remove them, or leave them out by omitting --strict (strict=False in Python)"
            raise ValueError("\n".join([first, *opened.inventory.unreadable_lines(), advice]))
        bad = {split: [image.place for image, _ in problems if image.split == split] for split in self.parts}
        kept = {n: images.at(np.setdiff1d(np.arange(len(images)), bad[n])) for n, images in self.parts.items()}
        return opened._with(kept)

    def grouped(self, group: str | None, seconds: float | None) -> "Opened":
        """Give the images their groups, see the function `grouped`; other columns of the data are dropped."""
        timed = {} if seconds is None else {split: times_taken(images) for split, images in self.parts.items()}
        parts, notes = grouped(self.parts, group, seconds, timed)
        names = {} if group is None and seconds is None else group_names(self.parts, group, seconds, timed)
        named = {
            int(number): key
            for split, of in names.items()
            if (numbers := parts[split].groups) is not None
            for number, key in zip(numbers, of, strict=True)
            if key is not None
        }
        for images in parts.values():
            images.columns = {}  # a table of a million rows would travel to every worker that reads images
        return self._with(parts, notes=[*self.inventory.notes, *notes], group_names=named)

    def held_out(self, fraction: float, split: str) -> "Opened":
        """Hold out a share of the training images as the test split, which is called `split`."""
        train, test = hold_out(self.train, fraction)
        parts = {next(iter(self.inventory.counts)): train, split: test}
        notes = [*self.inventory.notes]
        if train.groups is not None and test.groups is not None and (n := len({*train.groups} & {*test.groups})):
            notes.append(f"{counted(n, 'group')} in training and test images, with the only images of some class")
        return self._with(parts, counts=count_images(parts), notes=notes)

    def compared(self, every: bool) -> "Opened":
        """Count the readable images, and find duplicates and blank images.

        Copies of a file are always found. Pictures are compared with each other if `every` is true; otherwise a
        sample of them is checked for being blank.
        """
        parts = self.parts
        pictures = look_at(parts, None if every else SAMPLE)
        return self._with(
            parts,
            counts=count_images(parts),
            duplicates=find_duplicates(parts, pictures if every else None),
            blank=blank_lines(parts, pictures, 1 if every else max(3, len(pictures) // 8)),
            pictures=pictures,
        )

    def renamed(self, file: str) -> "Opened":
        """Rename the classes as a file of names says."""
        test = None if self.test is None else self.test.renamed(file)
        return self._replace(train=self.train.renamed(file), test=test)

    def drawn(
        self,
        validation_fraction: float | None,
        images_per_class: int | Sequence[int] | str | None,
        test_images_per_class: int | None,
        seed: int,
    ) -> "Opened":
        """Test on a share of the training images instead, and draw images of each class; None draws nothing."""
        train, test = self.train, self.test
        if validation_fraction is not None:
            train, test = hold_out(train, validation_fraction, seed, "validation")
        if images_per_class is not None:
            train = draw_per_class(train, images_per_class, seed)
        if test_images_per_class is not None:
            if test is None:
                raise ValueError(f"test_images_per_class is {test_images_per_class}, but there are no test images")
            test = draw_per_class(test, test_images_per_class, seed)
        return self._replace(train=train, test=test)


def hold_out(
    dataset: object, fraction: float, seed: int = 0, purpose: str = "test"
) -> tuple[LabelledImages, LabelledImages]:
    """Divide a data set into training images and held-out test images.

    A hash of the image's content and the seed decides where an image goes. File names, their order and the other
    images therefore do not matter: an image stays where it is when images are added, and copies within a class stay
    together. If the images have groups, the hash is that of the group, so all images of a group stay together. Every
    class keeps at least one training image. A class with two or more images, or groups, of which `fraction` is half an
    image or more, gets at least one test image, unless its groups are also those of other classes. If each group has
    the only images of some class, these images are trained on, and the others of their group may be held out.

    Args:
        dataset: A data set with class names.
        fraction: About which share of each class's images to hold out; above 0 and below 1.
        seed: A different seed holds out different images.
        purpose: A different word holds out different images, independently of those held out for other purposes.

    Returns:
        The training images and the test images.

    Raises:
        ValueError: If `fraction` is not between 0 and 1, no class has enough images, or there are no class names.

    Example:
        >>> train, test = hold_out(ImageFolder("photos"), 0.2)
        >>> len(train), len(test)
        (97, 23)
    """
    if not isinstance(fraction, Real) or not 0 < fraction < 1:
        raise ValueError(
            f"fraction must be above 0 and below 1, got {fraction!r}: some images must remain to train on"
        )
    seed = check_int("seed", seed, 0)
    images = labelled_images(dataset)
    drawn, labels = _draws(images, seed, purpose), images.labels
    tested = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.argsort(drawn[members], kind="stable")]
        enough = int(len(members) > 1 and fraction * len(members) >= 0.5)
        count = int(np.clip((drawn[members] < fraction).sum(), enough, len(members) - 1))
        edge = drawn[order[count - 1]] if count else -1.0  # copies of an image were given the same number
        tested[members] = drawn[members] <= edge if (drawn[members] > edge).any() else drawn[members] < edge
    if images.groups is not None:  # a group of several classes that is held out of only some of them is trained on
        whole = tested & ~np.isin(images.groups, images.groups[~tested])
        if not whole.any():  # so that a site can be tested although it has the only images of some class
            members = zip(labels.tolist(), images.groups.tolist(), strict=True)
            places = np.bincount([label for label, _ in set(members)], minlength=len(images.class_names))
            whole = tested & ~np.isin(images.groups, images.groups[~tested & (places[labels] > 1)])
        tested = whole
    if not tested.any():
        groups = "" if images.groups is None else ", or enough groups"
        raise ValueError(f"no class has enough images{groups} to hold out {fraction} of them")
    return images.at(np.flatnonzero(~tested)), images.at(np.flatnonzero(tested))


def draw_per_class(images: LabelledImages, count: int | Sequence[int] | str, seed: int = 0) -> LabelledImages:
    """Return at most `count` images of each class.

    Several counts are assigned to the classes in turn. `longtail:32` keeps 32, 32 / 2, 32 / 3, ... images. The seed
    decides which class comes first.
    """
    seed = check_int("seed", seed, 0)
    drawn, labels = _draws(images, seed, "draw"), images.labels
    keys = [hashlib.sha256(f"{seed} classes\0{name}".encode()).digest() for name in images.class_names]
    kept = []
    for rank, label in enumerate(sorted(np.unique(labels).tolist(), key=keys.__getitem__)):
        if isinstance(count, str):
            number = max(1, int(count.removeprefix("longtail:")) // (rank + 1))
        else:
            counts = [count] if isinstance(count, int) else list(count)
            number = check_int("count", counts[rank % len(counts)], 1)
        members = np.flatnonzero(labels == label)
        kept.append(members[np.argsort(drawn[members], kind="stable")[:number]])
    return images.at(np.sort(np.concatenate(kept)))


def _draws(images: LabelledImages, seed: int, purpose: str) -> np.ndarray:
    """Return a number in [0, 1) for each image, (n,), computed from the seed, the purpose and the image's content."""
    if not images.class_names:
        raise ValueError("the dataset has no class names; give it an attribute class_names, a sequence of strings")
    keys = (
        images.contents()
        if images.groups is None or purpose == "draw"
        else [str(group).encode() for group in images.groups]
    )
    digests = (hashlib.sha256(f"{seed} {purpose}\0".encode() + (key or b"")) for key in keys)
    return np.array([int.from_bytes(digest.digest()[:8], "little") / 2**64 for digest in digests])


DEPLOYMENT = "deploymentID"  # Camtrap DP's column of a camera's stay at a place
FEW = 10  # of fewer images, one group may well hold most
LONG = 20  # a burst that lasts this many times as long as its longest gap may last is said
FOLDER = "folder"  # groups are the folders in which the files are


def grouped(
    parts: Parts,
    group: str | None,
    seconds: float | None,
    times: Mapping[str, Sequence[float | None]],
) -> tuple[dict[str, LabelledImages], list[str]]:
    """Return the splits with the groups of their images, and sentences about them.

    Args:
        parts: Split -> images.
        group: A column of the data, "folder", or a regular expression whose first group names an image's group in its
            path. An image without a value, an inner folder or a match is a group of its own.
        seconds: If given, images that were taken within this time of one another are a group, if `group` does not
            tell them apart, or without `group` their folder or deployment. An image without a time is a group of its
            own.
        times: Split -> the time of each image in seconds, or None; used if `seconds` is given.

    Raises:
        ValueError: If no image has a group, or none was taken at a known time.
    """
    if group is None and seconds is None:
        return dict(parts), []
    keys = group_names(parts, group, seconds, times)
    alone = sum(key is None for of in keys.values() for key in of)
    if alone == sum(map(len, keys.values())):
        what = f"--group is {group!r}" if group is not None else f"--group-seconds is {seconds:g}"
        raise ValueError(f"{what}, but no image has a group: {_why_alone(group, seconds)}")
    named = {split: _named(parts[split], of) for split, of in keys.items()}
    notes = _notes(parts, keys)
    if seconds is not None:
        notes += _long(times, keys, seconds)
    if alone:
        notes.append(
            f"{counted(alone, 'image')} without a group, each a group of its own: {_why_alone(group, seconds)}"
        )
    return {split: images.grouped(named[split]) for split, images in parts.items()}, notes


def group_names(
    parts: Parts,
    group: str | None,
    seconds: float | None,
    times: Mapping[str, Sequence[float | None]],
) -> dict[str, list[str | None]]:
    """Return the name of each image's group, or None for an image that is a group of its own; see `grouped`."""
    placed = group is None and seconds is not None
    keys = {split: _places(images) if placed else _keys(images, group) for split, images in parts.items()}
    return keys if seconds is None else _bursts(times, keys, seconds)


def _why_alone(group: str | None, seconds: float | None) -> str:
    """Say what an image without a group lacks."""
    if seconds is not None:
        return "the photographs do not say when they were taken" + ("" if group is None else f", or have no {group!r}")
    if group == FOLDER:
        return "the files are directly in the folders of the classes, or in the given folder"
    return f"the value is missing, or no path matches {group!r}"


def _keys(images: LabelledImages, group: str | None) -> list[str | None]:
    """Return the name of each image's group, or None for an image without a group; "" for all if `group` is None."""
    if group is None:
        return [""] * len(images)
    if group in images.columns:
        values = images.columns[group]()
        texts = [str(values[position]).strip() for position in images.indices.tolist()]
        return [None if text.lower() in NO_VALUE else text for text in texts]
    paths = [images.path_of(index) for index in range(len(images))]
    if group == FOLDER and images.by_path:
        return [_folder(path, isinstance(images, ImageFolder)) for path in paths]
    try:
        pattern = re.compile(group)
    except re.error as error:
        raise ValueError(f"--group {group!r} is no regular expression: {error}") from error
    if not pattern.groups:
        listed = f"its columns are {', '.join(map(repr, images.columns))}" if images.columns else "it has no columns"
        raise ValueError(
            f"--group is {group!r}, expected a column of the data ({listed}), {FOLDER!r} for the folders of files, or "
            "a regular expression with a group in parentheses, such as '(item[0-9]+)'"
        )
    matches = [pattern.search(path) for path in paths]
    return [match[1] or None if match else None for match in matches]


def _places(images: LabelledImages) -> list[str | None]:
    """Return where each image was taken, such as by which camera: its deployment, or else its folder.

    A folder with the name of the image's class is left out, because a burst may show several classes.
    """
    if DEPLOYMENT in images.columns:
        return _keys(images, DEPLOYMENT)
    if not images.by_path:
        return [""] * len(images)
    names = images.class_names or ()
    labels = [names[label] if 0 <= label < len(names) else None for label in images.labels.tolist()]
    folders = [PurePosixPath(images.path_of(index)).parts[:-1] for index in range(len(images))]
    return ["/".join(part for part in of if part != label) for of, label in zip(folders, labels, strict=True)]


def _folder(path: str, of_classes: bool) -> str | None:
    """Return the folder of a file: class/ITEM in a folder of classes, even if ITEM contains folders."""
    folders = PurePosixPath(path).parts[:-1]
    folders = folders[:2] if of_classes else folders
    return "/".join(folders) if len(folders) > (1 if of_classes else 0) else None


def _bursts(
    times: Mapping[str, Sequence[float | None]], keys: Mapping[str, Sequence[str | None]], seconds: float
) -> dict[str, list[str | None]]:
    """Divide each group where no photograph was taken for longer than `seconds`."""
    taken: dict[str, list[tuple[float, str, int]]] = defaultdict(list)
    bursts: dict[str, list[str | None]] = {split: [None] * len(each) for split, each in times.items()}
    for split, each in times.items():
        for index, (key, time) in enumerate(zip(keys[split], each, strict=True)):
            if key is not None and time is not None:
                taken[key].append((time, split, index))
    for key, rows in taken.items():
        rows.sort()
        first, before = rows[0][0], rows[0][0]
        for time, split, index in rows:
            first = time if time - before > seconds else first
            before, bursts[split][index] = time, f"{key} at {clock(first)}".strip()
    return bursts


def _long(
    times: Mapping[str, Sequence[float | None]], keys: Mapping[str, Sequence[str | None]], seconds: float
) -> list[str]:
    """Return a sentence on bursts that last much longer than the time between two photographs of a burst."""
    spans: dict[str, tuple[float, float]] = {}
    for split, of in keys.items():
        for key, time in zip(of, times[split], strict=True):
            if key is not None and time is not None:
                first, last = spans.get(key, (time, time))
                spans[key] = min(first, time), max(last, time)
    long = sorted((first - last, key) for key, (first, last) in spans.items() if last - first > LONG * seconds)
    if not long:
        return []
    span, key = long[0]
    return [
        f"{counted(len(long), 'group')} much longer than --group-seconds {seconds:g}, such as {printable(key)!r} with "
        f"{-span:g} seconds: if its photographs do not show the same, give fewer seconds"
    ]


def _named(images: LabelledImages, keys: Sequence[str | None]) -> list[str]:
    """Return a text for each image's group. The content of an image without a group tells it apart."""
    contents = images.contents() if None in keys else [b""] * len(keys)
    return [
        f"group {key}" if key is not None else f"image {(content or images.item_name(index).encode()).hex()}"
        for index, (key, content) in enumerate(zip(keys, contents, strict=True))
    ]


def _notes(parts: Parts, keys: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Return sentences on the groups, on those in two splits, and on classes that lie in one group."""
    sizes = Counter(key for of in keys.values() for key in of if key is not None)
    name, most = sizes.most_common(1)[0]
    notes = [f"{counted(len(sizes), 'group')} of images, of which {printable(name)!r} has {most}"]
    total = sum(map(len, keys.values()))
    if 2 * most > total >= FEW:
        notes.append(f"the group {printable(name)!r} holds {most} of {total} images: is it really one item or event?")
    inside = [{key for key in of if key is not None} for of in keys.values()]
    shared = sorted(set.intersection(*inside)) if len(inside) > 1 else []
    if shared:
        both = f"{counted(len(shared), 'group')} in training and test images, such as {printable(shared[0])!r}"
        notes.append(f"{both}, so the accuracy is too optimistic")
    split, train = next(iter(parts.items()))
    owners: dict[str, set[int]] = defaultdict(set)
    for key, label in zip(keys[split], train.labels.tolist(), strict=True):
        if key is not None:
            owners[key].add(label)
    if mixed := [key for key, labels in owners.items() if len(labels) > 1]:
        notes.append(f"{counted(len(mixed), 'group')} with images of several classes, such as {printable(mixed[0])!r}")
    texts = np.array([key if key is not None else f"\0{index}" for index, key in enumerate(keys[split])])
    single = [
        train.class_names[label]
        for label in np.unique(train.labels[train.labels >= 0])
        if (train.labels == label).sum() > 1 and len(set(texts[train.labels == label])) == 1
    ]
    if single:
        notes.append(
            f"all training images of {counted(len(single), 'class')} are in one group, such as "
            f"{printable(single[0])!r}: for estimates, that is like a single image"
        )
    return notes
