"""Which split of data is learned from, which is tested on, and which are neither."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dulbe_peft.data.folders import SPLIT_NAMES, holds_only_folders, like_splits, split_flags, subfolders
from dulbe_peft.data.images import LabelledImages, Splits
from dulbe_peft.data.readers import splits

UNLABELLED = "images without labels test nothing"
VALIDATION = ("valid", "validation", "val")  # splits that are tested on where there is no test split
Unused = tuple[str, str, Path | None]  # where a split is that is not opened, why, and its folder where it is one
Tests = tuple[str, Callable[[], LabelledImages]]  # the name of a split, and what opens it


def stream_splits(
    path: str | os.PathLike[str],
    train_split: str,
    test_split: str,
    test_fraction: float | None = None,
    test_data: str | os.PathLike[str] | None = None,
    **reading: Any,
) -> tuple[Splits, list[Unused], Tests | None]:
    """The splits that `open_stream_data` opens, the others, and the tests; raises what is wrong before that."""
    if train_split == test_split:
        raise ValueError(
            f"train_split and test_split are both {train_split!r}, and a split is never its own test: name another "
            "test_split"
        )
    text, wanted = os.fspath(path), "test" if test_split == "none" else test_split
    found, unlabelled = splits(text, **reading), False
    if test_split == "test" not in found and train_split in found and {test_fraction, test_data} == {None}:
        wanted = next((name for name in VALIDATION if name in found), wanted)
    if {None} < found.keys():  # image files in folders, which may be splits or classes
        names, others = _folder_splits(Path(text), train_split, wanted)
        found = {name: found[name] for name in names}
        unlabelled = wanted in found and not subfolders(Path(text, wanted))
    else:
        for name in () if list(found) == [None] else (train_split, *([wanted] if wanted != "test" else [])):
            if name not in found:
                raise FileNotFoundError(f"{text} has no split {name!r}; its splits are {list(found)}")
        unused = [name for name in found if name and name not in (train_split, wanted)]
        others = [(f"{text}[{name}]", _unused(name), None) for name in unused]
    tests = (wanted, found.pop(wanted)) if wanted in found else None
    if tests is not None and (unlabelled or test_split == "none" or test_data is not None):
        folder = Path(text, wanted) if Path(text, wanted).is_dir() else None
        why = f"the split {wanted!r} has no folder of a class: {UNLABELLED}"
        others.append((str(folder or f"{text}[{wanted}]"), why if unlabelled else _unused(wanted), folder))
        tests = None
    for one, name in ((tests and tests[0], "the test split"), (test_data, "test_data")):
        if test_fraction is not None and one is not None:
            raise ValueError(
                f"test_fraction is {test_fraction}, but {text} has {name} {str(one)!r}: leave one out, as with "
                "--test-split none"
            )
    return found, others, tests if test_data is None else ("test", _other_tests(os.fspath(test_data), **reading))


def _other_tests(text: str, **reading: Any) -> Callable[[], LabelledImages]:
    """What opens the images of data that are all tested on: its split "test", or all where there are no splits."""
    found = splits(text, **reading)
    if None not in found and "test" not in found:
        raise FileNotFoundError(f"{text} has no split 'test'; its splits are {list(found)}")
    in_split = "test" in found and (None not in found or holds_only_folders(Path(text, "test")))
    return found["test" if in_split else None]


def _folder_splits(folder: Path, train: str, test: str) -> tuple[list[str | None], list[Unused]]:
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
            return [None], []  # a class that is called like a split, trains among other vehicles
        if strange:
            raise ValueError(
                f"{folder} holds {train!r}, in which there are folders alone, and beside it {strange[0]!r}. If "
                f"{train!r} is the split to learn from, give the folder {folder / train}, or move {strange[0]!r} "
                "elsewhere. If it is a class, put its images into it directly"
            )
    unused: list[Unused] = [(str(folder / name), _unused(name), folder / name) for name in others]
    return [name for name in names if name in (train, test)], unused


def _unused(split: str) -> str:
    return f"the split {split!r}, neither learned from nor tested on"
