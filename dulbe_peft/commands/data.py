"""Images that a command is given: the flags that name them, and what they ask of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def add_labelled(parser: Any) -> None:
    """The arguments that name labelled images to look at, and not to learn from."""
    parser.add_argument("--data", required=True, help="images: a folder, an .npz file, or hf:NAME for datasets")
    parser.add_argument("--split", default="test", help="split of the data (%(default)s); '' for a folder of classes")
    parser.add_argument("--class-names", metavar="FILE", help="text file with the names of the classes, as for run")


def load_labelled(arguments: Any) -> Any:
    """The images that the arguments of `add_labelled` name."""
    from dulbe_peft.streams.protocols import rename_classes
    from dulbe_peft.streams.readers import load_data

    data = load_data(arguments.data, split=arguments.split or None)
    return rename_classes(data, arguments.class_names) if arguments.class_names else data


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
