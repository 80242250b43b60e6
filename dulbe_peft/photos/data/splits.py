"""Divide a data set into training and test images, by its splits or by holding out a fraction."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.data.folders import (
    OF_A_SYSTEM,
    SPLIT_NAMES,
    ImageFolder,
    folder_content,
    holds_only_folders,
    subfolders,
    system_folders,
)
from dulbe_peft.data.images import LabelledImages, UnlabelledError, labelled_images
from dulbe_peft.data.names import class_key
from dulbe_peft.data.readers import load_data
from dulbe_peft.photos.data.inventory import (
    Inventory,
    Look,
    blank_lines,
    count_images,
    find_duplicates,
    inspect_parts,
    thumbnails,
    undecodable,
)
from dulbe_peft.photos.data.roles import UNLABELLED, VALIDATION, stream_splits
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.terminal import counted

SAMPLE = 32  # how many images are checked for being blank when the data are opened


def hold_out(
    dataset: Any, fraction: float, seed: int = 0, purpose: str = "test"
) -> tuple[LabelledImages, LabelledImages]:
    """Divide a data set into training images and held-out test images.

    A hash of the image's content and the seed decides where an image goes. File names, their order and the other
    images therefore do not matter: an image stays where it is when images are added, and copies within a class stay
    together. Every class keeps at least one training image. A class with two or more images, of which `fraction` is
    half an image or more, gets at least one test image.

    Args:
        dataset: a data set with class names.
        fraction: about which share of each class's images to hold out; above 0 and below 1.
        seed: a different seed holds out different images.
        purpose: a different word holds out different images, independently of those held out for other purposes.

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
    if not tested.any():
        raise ValueError(f"no class has enough images to hold out {fraction} of them")
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
    digests = (hashlib.sha256(f"{seed} {purpose}\0".encode() + (content or b"")) for content in images.contents())
    return np.array([int.from_bytes(digest.digest()[:8], "little") / 2**64 for digest in digests])


def open_stream_data(
    path: str | os.PathLike[str],
    train_split: str = "train",
    test_split: str = "test",
    test_fraction: float | None = None,
    test_data: str | os.PathLike[str] | None = None,
    strict: bool = True,
    look: Look = undecodable,
    **reading: Any,
) -> tuple[LabelledImages, LabelledImages | None, Inventory]:
    """Open the data of a stream, check every image, and choose the training and the test images.

    A folder of images holds splits, `photos/train/cat/*` and `photos/test/cat/*`, or only classes, `photos/cat/*`; in
    the latter case all images are for training. If there is no split `test`, then `valid`, `validation` or `val` is
    the test split. Other splits and test splits without labels are left out and counted.

    Args:
        path: the data, as for `load_data`.
        train_split: name of the training split.
        test_split: name of the test split, if there is one. "none" means that no split is tested on.
        test_fraction: about which share of each class to hold out if there is no test split; see [`hold_out`].
        test_data: separate test data. Its split `test` is used, or all of it if it has no splits.
        strict: whether an unreadable image is an error. Otherwise unreadable images are left out.
        look: a function that finds the unreadable images and the reasons. By default, all images are decoded.
        reading: further arguments of `load_data`.

    Returns:
        The training images; the test images or None; and the inventory, which counts these images.

    Raises:
        FileNotFoundError: If `path` does not exist or a split is missing.
        ValueError: If images are unreadable, there are both a test split and a fraction, or the layout is ambiguous.
    """
    parts, left_out, notes = _opened(path, train_split, test_split, test_fraction, test_data, **reading)
    train, (_, *tests) = parts[train_split], parts
    parts, inventory = readable(os.fspath(path), parts, strict, look, left_out)
    inventory = replace(inventory, notes=notes)
    for label in np.setdiff1d(train.labels, parts[train_split].labels):
        name = train.class_names[label]
        example, why = next(row for row in inventory.unreadable if row[0].label == name)
        raise ValueError(
            f"no image of the class {name!r} can be read, such as {example.name}: {why}; repair the images, or remove "
            "the class"
        )
    if test_fraction is not None:
        tests = ["test" if test_split == "none" else test_split]
        parts[train_split], parts[tests[0]] = hold_out(parts[train_split], test_fraction)
    pictures = thumbnails(parts, SAMPLE)
    blank = blank_lines(parts, pictures, max(3, len(pictures) // 8))
    inventory = replace(inventory, counts=count_images(parts), duplicates=find_duplicates(parts), blank=blank)
    return parts[train_split], parts[tests[0]] if tests else None, inventory


def _opened(
    path: str | os.PathLike[str], train_split: str, *given: Any, **reading: Any
) -> tuple[dict[str, LabelledImages], list[tuple[str, str]], list[str]]:
    """Return split -> images with the training split first, the files left out, and notes on what was guessed."""
    available, unused, tests = stream_splits(path, train_split, *given, **reading)
    left_out = [(place, why if folder is None else f"{why}, {_count(folder)}") for place, why, folder in unused]
    parts, notes = {train_split: available[train_split if train_split in available else None]()}, list[str]()
    if tests is not None:
        name, open_tests = tests
        try:
            parts[name] = open_tests()
        except UnlabelledError as error:
            left_out.append((f"{os.fspath(path)}[{name}]", f"{error}: {UNLABELLED}"))
        notes += [f"the test split is {name!r}, because there is no split 'test'"] * (given[0] != name in VALIDATION)
    notes += dict.fromkeys(note for images in parts.values() for note in images.notes)
    leave_out = reading.get("leave_out") or ()
    _check_left_out(leave_out, parts, Path(path))
    parts = {split: _without(images, leave_out) for split, images in parts.items()}
    train = parts[train_split]
    empty = [name for name in train.class_names if name not in _present(train)]
    if empty and len(train):
        notes.append(f"left out: {counted(len(empty), 'class')} without images, such as {empty[0]!r}")
        train = parts[train_split] = train.select(_present(train))
    for split in list(parts)[1:]:
        parts[split] = _match_classes(parts[split], train.class_names)
    if train.split is not None and Path(path).is_dir():
        left_out += [(str(Path(path, name)), OF_A_SYSTEM) for name in system_folders(Path(path))]
    return parts, left_out, notes + _nested_notes(train)


def _present(images: LabelledImages) -> tuple[str, ...]:
    """Return the names of the classes that have images."""
    return tuple(images.class_names[label] for label in np.unique(images.labels))


def _without(images: LabelledImages, names: Sequence[str]) -> LabelledImages:
    """Return the images without those of the classes `names`."""
    kept = [name for name in images.class_names if name not in names]
    return images if len(kept) == len(images.class_names) else images.select(kept)


def _check_left_out(names: Sequence[str], parts: dict[str, LabelledImages], folder: Path) -> None:
    """Raise a ValueError if a name in `leave_out` is neither a class nor a folder of the data."""
    for name in names:
        folders = (folder / name, *(folder / split / name for split in parts))
        is_class = any(name in images.class_names for images in parts.values())
        if not any(path.is_dir() for path in folders) and not is_class:
            raise ValueError(f"leave_out contains {name!r}, but {folder} has no class and no folder of that name")


def _match_classes(test: LabelledImages, names: Sequence[str]) -> LabelledImages:
    """Return the test images labelled by the training classes `names`; raise a ValueError for any other class."""
    spelling, unknown = {class_key(name): name for name in names}, [n for n in _present(test) if n not in names]
    for name in unknown:
        if class_key(name) in spelling:
            raise ValueError(
                f"a class is called {spelling[class_key(name)]!r} in the training images and {name!r} in the test "
                "images: use one spelling"
            )
    if unknown:
        more = f"({counted(len(unknown), 'such class')}; --leave-out leaves it out)"
        raise ValueError(f"class {unknown[0]!r} has test images and no training image {more}")
    return test.select(names, others=True)


def _nested_notes(images: LabelledImages) -> list[str]:
    """Return notes on classes whose images lie in inner folders, and on a class that is called like a split."""
    files: list[str] = images.source if type(images) is ImageFolder else []
    inner: dict[str, dict[str, None]] = {}  # class -> folders in it, in order; "" for images directly in the class
    for class_name, *folders, _ in (name.split("/") for name in files):
        inner.setdefault(class_name, {})[folders[0] if folders else ""] = None
    notes = []
    nested = {name: [*folders] for name, folders in inner.items() if "" not in folders}
    several = next((name for name, folders in nested.items() if len(folders) > 1), None)
    if nested and len(nested) == len(inner):
        listed = ", ".join(map(repr, [folder for folders in nested.values() for folder in folders][:3]))
        notes.append(
            f"the classes are the outer folders; the names of the folders in them, such as {listed}, are ignored"
        )
    elif several is not None:
        listed = ", ".join(map(repr, nested[several][:3]))
        notes.append(
            f"the class {several!r} is the outer folder; the names of the folders in it, {listed}, are ignored"
        )
    split_like = [name for name in images.class_names if name.lower() in SPLIT_NAMES] if files else []
    if images.split is None and split_like:
        notes.append(f"{split_like[0]!r} is read as a class; if it is a split, give it a folder for each class")
    return notes


def readable(
    path: str,
    parts: dict[str, LabelledImages],
    strict: bool,
    look: Look,
    left_out: Sequence[tuple[str, str]] = (),
) -> tuple[dict[str, LabelledImages], Inventory]:
    """Return the splits without unreadable images, and the inventory; raise if `strict` and an image is unreadable."""
    inventory = inspect_parts(parts, look, left_out)
    if inventory.unreadable and strict:
        first = f"{len(inventory.unreadable)} of the images in {path} cannot be read:"
        advice = "repair or remove them, or leave them out by omitting --strict (strict=False in Python)"
        raise ValueError("\n".join([first, *inventory.unreadable_lines(), advice]))
    bad = {split: [image.place for image, _ in inventory.unreadable if image.split == split] for split in parts}
    return {n: images.at(np.setdiff1d(np.arange(len(images)), bad[n])) for n, images in parts.items()}, inventory


def open_split(path: str | os.PathLike[str], split: str | None, **reading: Any) -> LabelledImages:
    """Open one split; the labels of an image folder number the training classes first, then further classes."""
    images, folder = load_data(path, split, **reading), Path(path)
    if not isinstance(images, ImageFolder) or split in (None, "train"):
        return images
    if "train" not in subfolders(folder) or not holds_only_folders(folder / "train"):
        return images
    names = dict.fromkeys([*ImageFolder(folder, "train").class_names, *images.class_names])
    return images.select(tuple(names), others=True)


def _count(folder: Path) -> str:
    return counted(len(folder_content(folder)[0]), "image")
