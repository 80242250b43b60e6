"""Open the data source of a command and print what was found; open it again later, as `sources.json` records it."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.photos.data.source import VALIDATION, DataSource
from dulbe_peft.utils.terminal import counted, print_once

if TYPE_CHECKING:  # numpy and Pillow are imported by the commands that need them
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.photos.data.looking import Look
    from dulbe_peft.streams.progress import FinishedTask


def data_or_labels(data: str | None, labels: str | None) -> str | None:
    """Return the value of --data or --labels; raise a ValueError if both are given."""
    if labels is None:
        return data
    if data:
        raise ValueError(f"--data is {data!r} and --labels is {labels!r}: the table names the images, so omit --data")
    if not labels.lower().endswith((".csv", ".tsv", ".jsonl")):
        raise ValueError(f"--labels is {labels!r}, expected a .csv file with the columns path,label")
    return labels


def open_source(
    source: DataSource, look: Look | None = None, notes: list[str] | None = None, known: Collection[str] = ()
) -> tuple[LabelledImages, LabelledImages | None]:
    """Open a data source and print its inventory; return the training images, and the test images or None.

    Args:
        source: The data source.
        look: A function that finds unreadable images, as in `DataSource.open`.
        notes: A list to which the lines on problems are appended.
        known: Learned classes, about which nothing is printed if they have few or no images here.
    """
    train, test, inventory = source.open(look)
    if notes is not None:
        problems = inventory.problems(len(inventory.unreadable), known)
        notes += [line.strip() for line in problems if line]
    print_once("\n".join([inventory.summary(), *inventory.problems(known=known)]))
    if inventory.unreadable:
        print_once("unreadable images are left out and not counted above; --strict makes them an error")
    if train.features is not None and train.features.note is None:
        print_once(f"{source.data} does not say which model its features are from: only their width is checked")
    given = next(iter(inventory.counts.values()))
    if len(inventory.counts) == 1 and given.keys() - {*known}:
        print_once(f"{source.data} has no test images; --test-fraction 0.2 holds out a fifth of the images")
    if source.class_names is not None:
        pairs = [f"{old!r} is {new!r}" for old, new in zip(given, train.class_names, strict=True)]
        print_once(f"names from {source.class_names}: {', '.join(pairs[:3])}" + (", ..." if len(pairs) > 3 else ""))
    elif all(map(str.isdecimal, train.class_names)):
        print_once("the class names are numbers: --class-names FILE gives the classes names that a model can read")
    drawn = (source.validation_fraction, source.images_per_class, source.test_images_per_class)
    if any(each is not None for each in drawn):
        held_out = " held-out ones" if source.validation_fraction else ""
        tested = "" if test is None else f", testing on {len(test)}{held_out}"
        print_once(f"training on {counted(len(train), 'image')}{tested}")
    return train, test


def open_images(source: DataSource, split: str | None, look: Look) -> LabelledImages:
    """Open the images of one split, see `DataSource.open_split`; print unreadable images, and what was grouped."""
    images, inventory = source.open_split(split, look)
    if inventory.unreadable or inventory.notes:
        print("\n".join([inventory.summary(), *inventory.problems()]), file=sys.stderr)
    return images


def reopen_tests(
    tasks: Sequence[FinishedTask], known: KnownImages, renamed: Mapping[str, str]
) -> list[LabelledImages | None]:
    """Return the test images of each earlier task, found by their content, or None for a task whose images are gone.

    A line is printed for each such task. `renamed` maps the folder names of classes to their present names.
    """
    reopened = cache(lambda entry: DataSource.of(json.loads(entry)).reopen())
    tests: list[LabelledImages | None] = []
    for number, task in enumerate(tasks, 1):
        test = None
        try:
            if task.source is None:
                raise ValueError("the run did not record where they came from")
            parts = reopened(json.dumps(task.source))
            test = _find_tests(parts, task.class_names, known, task.source["data"], renamed)
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            print(f"the test images of task {number} are not used again: {error}", file=sys.stderr)
        tests.append(test)
    return tests


def _find_tests(
    parts: Sequence[LabelledImages],
    names: Sequence[str],
    known: KnownImages,
    data: str,
    renamed: Mapping[str, str],
) -> LabelledImages | None:
    """Return all images of the classes `names` that were tested on, or None if the classes had no test images."""
    import numpy as np

    from dulbe_peft.data.known import compared

    if not any(known.tested.get(name) for name in names):
        if known.complete:
            return None
        raise ValueError("this learner has no record of its images")
    for part in parts:
        class_of, _, missing = compared(part, known.tested, names, renamed)
        if not missing:
            return part.at(list(class_of), np.array([names.index(name) for name in class_of.values()]), names)
    raise ValueError(f"the images in {data} are not those that the task was tested on")


def tests_of(source: Mapping[str, Any] | None) -> list[str]:
    """The flags with which `evaluate` finds the test images of a task's source, as far as they lie apart and here.

    Those that a run held out lie among those that it learned.
    """
    if source is not None and source.get("test_data"):
        return ["--data", str(source["test_data"])]
    if source is not None and source.get("test_split") not in (None, "none") and not source.get("test_fraction"):
        folder = Path(str(source.get("data")))
        for split in (source["test_split"], *VALIDATION):
            if (folder / split).is_dir():
                return ["--data", str(folder), *([] if split == "test" else ["--split", split])]
    return ["--data", "PHOTOS"]


def new_images(images: LabelledImages, known: KnownImages, advice: str = "") -> LabelledImages:
    """Return the training images without copies and without images learned before; print what is left out."""
    rows, repeated = known.new_rows(images)
    for reason, which in repeated.items():
        name, learned = images.item_name(which[0]), known.class_of().get(images.contents()[which[0]] or b"")
        was = f", learned as {learned!r} before" if reason == "of another class" else ""
        print_once(f"left out, because they would count twice: {len(which)} {reason}, such as {name}{was}{advice}")
    if not known.complete:
        print_once("this learner has no record of its images, so repeated images cannot be recognized")
    return images.at(rows)


def report_leaks(train: LabelledImages, test: LabelledImages | None, known: KnownImages) -> None:
    """Print how many training images were tested on in an earlier task, and how many test images were trained on."""
    tested = {content for contents in known.tested.values() for content in contents}
    for images, others, kind, earlier in (
        (train, tested, "training image", "test images"),
        (test, set(known.class_of()), "test image", "training images"),
    ):
        rows = [] if images is None else [row for row, content in enumerate(images.contents()) if content in others]
        if images is not None and rows:
            verb, name = "was" if len(rows) == 1 else "were", images.item_name(rows[0])
            leak = f"{counted(len(rows), kind)}, such as {name}, {verb} among the {earlier} of an earlier task"
            print_once(f"{leak}, so the accuracy on them is too optimistic")
