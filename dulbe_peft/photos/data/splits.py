"""Images to learn from and images to test on: from the splits that are there, or held back by a rule."""

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

SAMPLE = 32  # images that are looked at for many that show nothing


def hold_out(
    dataset: Any, fraction: float, seed: int = 0, purpose: str = "test"
) -> tuple[LabelledImages, LabelledImages]:
    """Divide a data set into images to learn from and images to test on.

    A hash of each image's content and of the seed decides. So neither names nor the order of the files nor the other
    images matter: an image stays on its side when others come, and its copies in the class come along. At least one
    image of a class is learned from; where a class has two or more and `fraction` of them makes half an image or more,
    at least one is tested on.

    Args:
        dataset: a data set that carries class names.
        fraction: of each class's images, about how many to test on; above 0 and below 1.
        seed: another seed holds back other images.
        purpose: another word holds back other images, independently of those held back before.

    Returns:
        The images to learn from, and the images to test on.

    Raises:
        ValueError: `fraction` is not between 0 and 1, no class has an image to spare, or there are no class names.

    Example:
        >>> train, test = hold_out(ImageFolder("photos"), 0.2)
        >>> len(train), len(test)
        (97, 23)
    """
    if not isinstance(fraction, Real) or not 0 < fraction < 1:
        raise ValueError(f"fraction must be above 0 and below 1, got {fraction!r}: some images are left to learn from")
    seed = check_int("seed", seed, 0)
    images = labelled_images(dataset)
    drawn, labels = _draws(images, seed, purpose), images.labels
    tested = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.argsort(drawn[members], kind="stable")]
        enough = int(len(members) > 1 and fraction * len(members) >= 0.5)
        count = int(np.clip((drawn[members] < fraction).sum(), enough, len(members) - 1))
        edge = drawn[order[count - 1]] if count else -1.0  # copies of an image have the same number
        tested[members] = drawn[members] <= edge if (drawn[members] > edge).any() else drawn[members] < edge
    if not tested.any():
        raise ValueError(f"no class has enough images to hold {fraction} of them back")
    return images.at(np.flatnonzero(~tested)), images.at(np.flatnonzero(tested))


def draw_per_class(images: LabelledImages, count: int | Sequence[int] | str, seed: int = 0) -> LabelledImages:
    """At most `count` images of each class; or counts that go round among them; or `longtail:32`: 32, 16, 32 / 3."""
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
    """(n,): a number in [0, 1) for each image, by the seed, the purpose and the image's content."""
    if not images.class_names:
        raise ValueError("the dataset carries no class names; give it an attribute class_names, a sequence of strings")
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
    """Open the data of a stream, look at all of it, and decide what is learned and what is tested on.

    A folder of images holds its splits, `photos/train/cat/*` and `photos/test/cat/*`, or its classes alone,
    `photos/cat/*`; then all images are there to learn from. Without a split `test`, `valid`, `validation` or `val` is
    tested on. Other splits are left out and counted, and so are tests that have no labels.

    Args:
        path: what `load_data` takes.
        train_split: name of the split to learn from.
        test_split: name of the split to test on, where there is one; "none": test on none of them.
        test_fraction: without a test split: about how much of each class is held back, see [`hold_out`].
        test_data: other data, whose images are tested on: its split `test`, or all of it where there are no splits.
        strict: raise where an image cannot be read. Else such images are left out.
        look: what finds the images that cannot be read, with the reasons; by itself, it decodes all.
        reading: other arguments of `load_data`.

    Returns:
        The images to learn from; those to test on, or None; and the inventory, which counts these images.

    Raises:
        FileNotFoundError: there is nothing under this path, or it lacks a split.
        ValueError: images cannot be read, there are a test split and a fraction, or the layout is not clear.
    """
    parts, left_out, notes = _opened(path, train_split, test_split, test_fraction, test_data, **reading)
    train, (_, *tests) = parts[train_split], parts
    parts, inventory = readable(os.fspath(path), parts, strict, look, left_out)
    inventory = replace(inventory, notes=notes)
    for label in np.setdiff1d(train.labels, parts[train_split].labels):
        name = train.class_names[label]
        example, why = next(row for row in inventory.unreadable if row[0].label == name)
        raise ValueError(
            f"no image of the class {name!r} can be read, such as {example.name}: {why}; mend them, or take the class "
            "away"
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
    """The images to learn from and, behind them, to test on by split; what is left out; and what was guessed."""
    found, others, tests = stream_splits(path, train_split, *given, **reading)
    left_out = [(place, why if folder is None else f"{why}, {_count(folder)}") for place, why, folder in others]
    parts, notes = {train_split: found[train_split if train_split in found else None]()}, list[str]()
    if tests is not None:
        name, opens = tests
        try:
            parts[name] = opens()
        except UnlabelledError as error:
            left_out.append((f"{os.fspath(path)}[{name}]", f"{error}: {UNLABELLED}"))
        notes += [f"tested on {name!r}, for there is no split 'test'"] * (given[0] != name in VALIDATION)
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
        parts[split] = _tests_alike(parts[split], train.class_names)
    if train.split is not None and Path(path).is_dir():
        left_out += [(str(Path(path, name)), OF_A_SYSTEM) for name in system_folders(Path(path))]
    return parts, left_out, notes + _nested_note(train)


def _present(images: LabelledImages) -> tuple[str, ...]:
    """The names of the classes that have images."""
    return tuple(images.class_names[label] for label in np.unique(images.labels))


def _without(images: LabelledImages, names: Sequence[str]) -> LabelledImages:
    """The images of other classes than these."""
    kept = [name for name in images.class_names if name not in names]
    return images if len(kept) == len(images.class_names) else images.select(kept)


def _check_left_out(names: Sequence[str], parts: dict[str, LabelledImages], folder: Path) -> None:
    """Raise where what shall be left out is nothing that is there."""
    for name in names:
        places = (folder / name, *(folder / split / name for split in parts))
        if not any(place.is_dir() for place in places) and not any(name in of.class_names for of in parts.values()):
            raise ValueError(f"leave_out names {name!r}, and {folder} has no class and no folder that is called so")


def _tests_alike(test: LabelledImages, names: Sequence[str]) -> LabelledImages:
    """Test images with the labels of the classes that are learned; another class is a ValueError."""
    spelt, unknown = {class_key(name): name for name in names}, [name for name in _present(test) if name not in names]
    for name in unknown:
        if class_key(name) in spelt:
            raise ValueError(
                f"a class is {spelt[class_key(name)]!r} to learn and {name!r} to test: spell it in one way"
            )
    if unknown:
        more = f"({counted(len(unknown), 'such class')}; --leave-out leaves it out)"
        raise ValueError(f"class {unknown[0]!r} has test images and no training image {more}")
    return test.select(names, others=True)


def _nested_note(images: LabelledImages) -> list[str]:
    """A sentence where the folders of all classes hold folders alone, which may be the classes that are meant."""
    files: list[str] = images.source if type(images) is ImageFolder else []
    inner = [name.split("/")[1] for name in files if name.count("/") > 1]
    if not inner or len(inner) < len(files):
        return []
    listed = ", ".join(map(repr, dict.fromkeys(inner[:3])))
    return [f"the classes are the outer folders; the folders in them, such as {listed}, name nothing"]


def readable(
    path: str,
    parts: dict[str, LabelledImages],
    strict: bool,
    look: Look,
    left_out: Sequence[tuple[str, str]] = (),
) -> tuple[dict[str, LabelledImages], Inventory]:
    """The splits without images that cannot be read, and what was found; raises if `strict` and there are some."""
    found = inspect_parts(parts, look, left_out)
    if found.unreadable and strict:
        first = f"{len(found.unreadable)} of the images in {path} cannot be read:"
        advice = "mend or remove them, or leave them out: without --strict (in Python strict=False)"
        raise ValueError("\n".join([first, *found.unreadable_lines(), advice]))
    bad = {split: [image.place for image, _ in found.unreadable if image.split == split] for split in parts}
    return {n: images.at(np.setdiff1d(np.arange(len(images)), bad[n])) for n, images in parts.items()}, found


def open_split(path: str | os.PathLike[str], split: str | None, **reading: Any) -> LabelledImages:
    """One split as `load_data` opens it, labelled by the classes of the training images, then by its own."""
    images, folder = load_data(path, split, **reading), Path(path)
    if not isinstance(images, ImageFolder) or split in (None, "train"):
        return images
    if "train" not in subfolders(folder) or not holds_only_folders(folder / "train"):
        return images
    names = dict.fromkeys([*ImageFolder(folder, "train").class_names, *images.class_names])
    return images.select(tuple(names), others=True)


def _count(folder: Path) -> str:
    return counted(len(folder_content(folder)[0]), "image")
