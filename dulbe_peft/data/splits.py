"""Images to learn from and images to test on: from the splits that are there, or held back by a rule."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.data.digits import DEMO_DIGITS
from dulbe_peft.data.folders import SPLIT_NAMES, Found, holds_only_folders, subfolders
from dulbe_peft.data.hub import hub_splits, is_saved
from dulbe_peft.data.inventory import Inventory, images_at, inspect_images, unreadable_lines, without
from dulbe_peft.data.names import spelled_as
from dulbe_peft.data.npz import npz_splits
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.samples import carried_class_names, dataset_class_names, dataset_labels, source_item
from dulbe_peft.data.subset import ClassSubset
from dulbe_peft.utils.checks import check_int, check_number

# ---------------------------------------------------------------------- holding images back


def hold_out(dataset: Any, fraction: float, seed: int = 0, purpose: str = "test") -> tuple[ClassSubset, ClassSubset]:
    """Divide a data set into images to learn from and images to test on.

    A hash of each image's name and class, and of the seed, decides. So neither the order of the files nor the other
    images matter, and an image stays on its side when others come. Two rules for small classes go before: at least
    one image of a class is learned from, and where a class has two images or more and `fraction` of them makes half
    an image or more, at least one is tested on.

    Args:
        dataset: a data set that carries class names.
        fraction: of each class's images, about how many to test on; above 0 and below 1.
        seed: another seed holds back other images.
        purpose: another word holds back other images, independently. So images that are left after some were held back
            for tests can be divided again.

    Returns:
        The images to learn from, and the images to test on.

    Raises:
        ValueError: `fraction` is not between 0 and 1, no class has an image to spare, or the data set carries no
            class names.

    Example:
        >>> train, test = hold_out(ImageFolder("photos"), 0.2)
        >>> len(train), len(test)
        (97, 23)
    """
    check_number("fraction", fraction, positive=True)
    if fraction >= 1:
        raise ValueError(f"fraction must be below 1, got {fraction}: some images must be left to learn from")
    seed = check_int("seed", seed, 0)
    drawn, labels = _draws(dataset, seed, purpose)
    tested = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.argsort(drawn[members], kind="stable")]
        enough = int(len(members) > 1 and fraction * len(members) >= 0.5)
        count = int(np.clip((drawn[members] < fraction).sum(), enough, len(members) - 1))
        tested[order[:count]] = True
    if not tested.any():
        raise ValueError(f"no class has enough images to hold {fraction} of them back")
    return images_at(dataset, np.flatnonzero(~tested)), images_at(dataset, np.flatnonzero(tested))


def draw_per_class(dataset: Any, count: int, seed: int = 0) -> ClassSubset:
    """At most so many images of each class, drawn at random; with a smaller `count` some of the same ones.

    Like `hold_out`, a hash of each image's name and class, and of the seed, decides.

    Args:
        dataset: a data set that carries class names.
        count: images of each class, at least 1.
        seed: another seed draws other images.

    Raises:
        ValueError: `count` is below 1, or the data set carries no class names.
    """
    count, seed = check_int("count", count, 1), check_int("seed", seed, 0)
    drawn, labels = _draws(dataset, seed, "draw")
    kept = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    kept = [members[np.argsort(drawn[members], kind="stable")[:count]] for members in kept]
    return images_at(dataset, np.sort(np.concatenate(kept)))


def _draws(dataset: Any, seed: int, purpose: str) -> tuple[np.ndarray, np.ndarray]:
    """A number in [0, 1) for each image, and the labels."""
    names, labels = carried_class_names(dataset), dataset_labels(dataset)
    return np.array([_draw(dataset, index, names[label], seed, purpose) for index, label in enumerate(labels)]), labels


def _draw(dataset: Any, index: int, class_name: str, seed: int, purpose: str) -> float:
    """A number in [0, 1) that the seed, the purpose, the class and the image's own name decide."""
    origin, position = source_item(dataset, index)
    named = getattr(origin, "relative_name", None) or getattr(origin, "content_id", None)
    name = str(position) if named is None else named(position)
    what = f"{seed}" if purpose == "test" else f"{seed} {purpose}"  # tests: as in version 0.1
    digest = hashlib.sha256(b"\0".join([what.encode(), class_name.encode(), os.fsencode(name)])).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


# ---------------------------------------------------------------------- opening what there is


def open_stream_data(
    path: str | os.PathLike[str],
    train_split: str = "train",
    test_split: str = "test",
    test_fraction: float | None = None,
    skip_unreadable: bool = False,
) -> tuple[Any, Any, Inventory]:
    """Open the data of a stream, look at all of it, and decide what is learned and what is tested on.

    A folder of images holds its splits, `photos/train/cat/*` and `photos/test/cat/*`, or its classes alone,
    `photos/cat/*`; then all images are there to learn from. Other splits such as `val` are left out and counted.

    Args:
        path: what `load_data` takes.
        train_split: name of the split to learn from.
        test_split: name of the split to test on, where there is one.
        test_fraction: without a test split: about how much of each class is held back, see [`hold_out`].
        skip_unreadable: leave unreadable images out instead of raising. Every image is decoded to find them.

    Returns:
        The images to learn from; those to test on, or None; and the inventory, which counts these images.

    Raises:
        FileNotFoundError: there is nothing under this path, or it lacks a split.
        ValueError: images cannot be read, the message names them; there are a test split and a fraction; it is not
            clear whether a folder is a split or a class; or what is there does not have the layout.

    Example:
        >>> train, test, found = open_stream_data("photos", test_fraction=0.2)
        >>> print(found.summary())
        2 classes; images: 97 in train, 23 in test
    """
    splits, left_out = _splits(path, train_split, test_split)
    if test_fraction is not None and test_split in splits:
        raise ValueError(
            f"test_fraction is {test_fraction}, but {os.fspath(path)} has the test split {test_split!r}: leave one out"
        )
    train: Any = load_data(path, train_split if splits else None)
    test: Any = load_data(path, test_split) if test_split in splits else None
    if test is not None:
        test = _with_classes_of(train, test)
    found = Inventory({}, left_out=left_out) + inspect_images(train, split=train_split, in_full=skip_unreadable)
    if test is not None:
        found += inspect_images(test, split=test_split, in_full=skip_unreadable)
    if found.unreadable and not skip_unreadable:
        raise ValueError(_unreadable_message(path, found))
    train = _readable(train, found.positions.get(train_split))
    test = _readable(test, found.positions.get(test_split))
    if test_fraction is not None:
        train, test = hold_out(train, test_fraction)
    used = ((train_split, train), *([] if test is None else [(test_split, test)]))
    return train, test, replace(found, counts={split: _counts(data) for split, data in used})


def _unreadable_message(path: str | os.PathLike[str], found: Inventory) -> str:
    count = len(found.unreadable)
    lines = unreadable_lines(found.unreadable)
    return "\n".join(
        [
            f"{count} of the images in {os.fspath(path)} cannot be read:",
            *lines,
            "mend or remove them, or leave them out with --skip-unreadable (in Python skip_unreadable=True)",
        ]
    )


def _readable(dataset: Any, bad: list[int] | None) -> Any:
    return without(dataset, bad) if bad else dataset


def _counts(dataset: Any) -> dict[str, int]:
    names = dataset_class_names(dataset) or ()
    return {n: int(c) for n, c in zip(names, np.bincount(dataset_labels(dataset), minlength=len(names)))}


def _with_classes_of(train: Any, test: Any) -> Any:
    """The test images with the labels of the training images, where some class has no test image."""
    names, written = dataset_class_names(train) or (), dataset_class_names(test) or ()
    tested = spelled_as(written, names)
    unknown = [name for name in tested if name not in names]
    if unknown:
        raise ValueError(f"class {unknown[0]!r} has test images and no training image ({len(unknown)} such classes)")
    if names == written:
        return test
    labels = dataset_labels(test)
    positions = np.array([names.index(name) for name in tested], dtype=np.int64)
    return ClassSubset(test, np.arange(len(labels)), positions[labels], names, labels)


def _splits(path: str | os.PathLike[str], train: str, test: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The splits of a data set, none where it holds classes alone, and those that are left out, with the reason."""
    text, folder = os.fspath(path), Path(path)
    if text == DEMO_DIGITS and not folder.exists():
        splits = ["train", "test"]
    elif not text.startswith("hf:") and folder.is_dir() and not is_saved(folder):
        return _folder_splits(folder, train, test)
    elif text.startswith("hf:") or folder.is_dir():
        splits = hub_splits(text) or [train]  # a data set saved without splits: what it is called is open
    elif folder.suffix.lower() == ".npz" and folder.is_file():
        splits = npz_splits(folder)
    else:
        return [train], []  # load_data says what is wrong
    _check_split(text, train, splits, True)
    _check_split(text, test, splits, test != "test")
    return splits, [(f"{text}[{name}]", _unused(name)) for name in splits if name not in (train, test)]


def _check_split(text: str, name: str, splits: list[str], needed: bool) -> None:
    if needed and name not in splits:
        raise FileNotFoundError(f"{text} has no split {name!r}; its splits are {splits}")


def _unused(split: str) -> str:
    return f"the split {split!r}, neither learned from nor tested on"


def _folder_splits(folder: Path, train: str, test: str) -> tuple[list[str], list[tuple[str, str]]]:
    names = subfolders(folder)
    others = [name for name in names if name not in (train, test)]
    if train not in names:
        _refuse_without_train(folder, names, train, test)
        return [], []
    if test not in names:
        if test != "test":
            raise FileNotFoundError(f"{folder} has no split {test!r}; its folders are {names}")
        if not holds_only_folders(folder / train):
            return [], []  # a class that is called like a split, trains among other vehicles
        strange = [name for name in others if name.lower() not in SPLIT_NAMES]
        if strange:
            raise ValueError(
                f"{folder} holds {train!r}, in which there are folders alone, and beside it {strange[0]!r}. If "
                f"{train!r} is the split to learn from, give the folder {folder / train}, or move {strange[0]!r} "
                "elsewhere. If it is a class, put its images into it directly"
            )
    left_out = []
    for name in others:
        count = len(Found(folder / name).images)
        left_out.append((str(folder / name), f"{_unused(name)}, {count} images"))
    return [name for name in names if name in (train, test)], left_out


def _refuse_without_train(folder: Path, names: list[str], train: str, test: str) -> None:
    """Raise where there are splits, but not the one to learn from."""
    known = [name for name in names if name == test or name.lower() in SPLIT_NAMES]
    splits = [name for name in known if holds_only_folders(folder / name)]
    if train != "train" or test != "test" or splits:
        hint = f"; if {splits[0]!r} is a split, name the one to learn from with --train-split" if splits else ""
        raise FileNotFoundError(f"{folder} has no split {train!r}; its folders are {names}{hint}")
