"""Images that a command learns from: opened, looked at and reported before anything is loaded or trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def open_data(
    path: str,
    train_split: str,
    test_split: str,
    test_fraction: float | None,
    skip_unreadable: bool,
    report: bool = True,
) -> tuple[Any, Any]:
    """Training and test images, after a report of what there is; see `streams.splits.open_stream_data`.

    Args:
        path: a folder, an `.npz` file, or hf:NAME.
        train_split: name of the split to learn from.
        test_split: name of the split to test on.
        test_fraction: share of the images to hold back for tests where there is no such split.
        skip_unreadable: leave out images that cannot be read.
        report: say what was found.

    Returns:
        The images to learn from, and those to test on or None.
    """
    from dulbe_peft.streams.splits import open_stream_data

    train, test, found = open_stream_data(path, train_split, test_split, test_fraction, skip_unreadable)
    if not report:
        return train, test
    say(found.format() if found.left_out or found.unreadable else found.summary())
    if found.unreadable:
        say("the images that cannot be read are left out, as --skip-unreadable says, and not counted above")
    if test is None:
        say(f"{path} has no test images; --test-fraction 0.2 holds a fifth of the images back")
    return train, test


def check_run_folder(data: str, output: str) -> None:
    """Raise a ValueError where a run would be written among the images that it learns from."""
    images, run = Path(data).resolve(), Path(output).resolve()
    if images.is_dir() and (run == images or images in run.parents):
        raise ValueError(f"--output {output!r} lies in --data {data!r}: its folders would be taken for classes")


def fit_increment(increment: int | None, num_classes: int) -> int:
    """How many classes a task has: what was asked for, as far as there are so many; says what it chose.

    Args:
        increment: classes per task. None: 10, or about half of the classes where there are fewer than 20.
        num_classes: how many classes there are.
    """
    if increment is None:
        if num_classes >= 20:
            return 10
        chosen = max(1, -(-num_classes // 2))
        say(f"increment is not set: tasks of {chosen}, about half of the {num_classes} classes")
        return chosen
    if increment > num_classes:
        say(f"increment is {increment}, there are {num_classes} classes: they are learned as one task")
        return num_classes
    return increment


def say(text: str) -> None:
    """Print in the first of several processes alone, also before they have found each other."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
