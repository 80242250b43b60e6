"""Decide which split is trained on, which one is tested on, and which ones are unused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dulbe_peft.data.folders import SPLIT_NAMES, holds_only_folders, like_splits, split_flags, subfolders
from dulbe_peft.data.images import LabelledImages, Splits
from dulbe_peft.data.readers import splits

UNLABELLED = "images without labels cannot be tested on"
VALIDATION = ("valid", "validation", "val")  # splits that are tested on if there is no test split
Unused = tuple[str, str, Path | None]  # the name or path of an unused split, the reason, and its folder if it has one
Tests = tuple[str, Callable[[], LabelledImages]]  # the name of the test split, and a function that opens it


def stream_splits(
    path: str | os.PathLike[str],
    train_split: str,
    test_split: str,
    test_fraction: float | None = None,
    test_data: str | os.PathLike[str] | None = None,
    **reading: Any,
) -> tuple[Splits, list[Unused], Tests | None]:
    """Return the splits that `open_stream_data` opens, the unused splits, and the test split if there is one.

    Invalid combinations of the arguments raise an error here, before any image is opened.
    """
    if train_split == test_split:
        raise ValueError(
            f"train_split and test_split are both {train_split!r}, but training images cannot be the test images: "
            "name another test_split"
        )
    text, wanted = os.fspath(path), "test" if test_split == "none" else test_split
    available, unlabelled = splits(text, **reading), False
    if test_split == "test" not in available and train_split in available and {test_fraction, test_data} == {None}:
        wanted = next((name for name in VALIDATION if name in available), wanted)
    if {None} < available.keys():  # image files in folders, which may be splits or classes
        names, unused = _folder_splits(Path(text), train_split, wanted)
        available = {name: available[name] for name in names}
        unlabelled = wanted in available and not subfolders(Path(text, wanted))
    else:
        for name in () if list(available) == [None] else (train_split, *([wanted] if wanted != "test" else [])):
            if name not in available:
                raise FileNotFoundError(f"{text} has no split {name!r}; its splits are {list(available)}")
        others = [name for name in available if name and name not in (train_split, wanted)]
        unused = [(f"{text}[{name}]", _unused(name), None) for name in others]
    tests = (wanted, available.pop(wanted)) if wanted in available else None
    if tests is not None and (unlabelled or test_split == "none" or test_data is not None):
        folder = Path(text, wanted) if Path(text, wanted).is_dir() else None
        why = f"the split {wanted!r} has no class folder: {UNLABELLED}"
        unused.append((str(folder or f"{text}[{wanted}]"), why if unlabelled else _unused(wanted), folder))
        tests = None
    for value, name in ((tests and tests[0], "the test split"), (test_data, "test_data")):
        if test_fraction is not None and value is not None:
            raise ValueError(
                f"test_fraction is {test_fraction}, but {text} has {name} {str(value)!r}: use only one of them, for "
                "example with --test-split none"
            )
    return available, unused, tests if test_data is None else ("test", _other_tests(os.fspath(test_data), **reading))


def _other_tests(text: str, **reading: Any) -> Callable[[], LabelledImages]:
    """Return a function that opens separate test data: its split "test", or all of it if it has no splits."""
    available = splits(text, **reading)
    if None not in available and "test" not in available:
        raise FileNotFoundError(f"{text} has no split 'test'; its splits are {list(available)}")
    in_split = "test" in available and (None not in available or holds_only_folders(Path(text, "test")))
    return available["test" if in_split else None]


def _folder_splits(folder: Path, train: str, test: str) -> tuple[list[str | None], list[Unused]]:
    """Return the names of a folder's splits, or [None] if its subfolders are classes, and its unused splits."""
    names = subfolders(folder)
    others = [name for name in names if name not in (train, test)]
    if train not in names:
        known = [name for name in names if name == test or name in like_splits(names)]
        inner = [name for name in known if holds_only_folders(folder / name)]
        if train != "train" or test != "test" or inner:
            hint = f"; if {inner[0]!r} is a split, name it: {split_flags(inner)}" if inner else ""
            raise FileNotFoundError(f"{folder} has no split {train!r}; its folders are {names}{hint}")
        return [None], []
    if test not in names:
        if test != "test":
            raise FileNotFoundError(f"{folder} has no split {test!r}; its folders are {names}")
        strange = [name for name in others if name.lower() not in SPLIT_NAMES]
        if not holds_only_folders(folder / train) and (strange or not subfolders(folder / train)):
            return [None], []  # "train" is a class, for example among other vehicles, and not a split
        if strange:
            raise ValueError(
                f"{folder} holds {train!r}, which contains only folders, and {strange[0]!r}. If {train!r} is the "
                f"training split, give the folder {folder / train}, or move {strange[0]!r} elsewhere. If it is a "
                "class, put its images directly into it"
            )
    unused: list[Unused] = [(str(folder / name), _unused(name), folder / name) for name in others]
    return [name for name in names if name in (train, test)], unused


def _unused(split: str) -> str:
    return f"the split {split!r}, which is neither trained nor tested on"
