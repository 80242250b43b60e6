"""Open the images that a command names, and reopen them later from the source recorded in a run's `sources.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.utils.terminal import counted, print_once

if TYPE_CHECKING:  # numpy and Pillow are imported by the commands that need them
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.photos.data.inventory import Look
    from dulbe_peft.photos.runs.settings import StreamArguments
    from dulbe_peft.streams.progress import FinishedTask

# The first arguments of `open_stream_data`.
_SPLITS = ("data", "train_split", "test_split", "test_fraction", "test_data")
_READING = ("vocabulary", "image_column", "label_column", "path_column", "leave_out")  # arguments of `load_data`
DATA_FIELDS = (*_SPLITS, "strict", "class_names", *_READING)
_DRAWS = ("validation_fraction", "images_per_class", "draw_seed")
FIELDS = (*DATA_FIELDS, *_DRAWS)


def source_of(stream: StreamArguments) -> dict[str, Any]:
    """Return the settings that name the data, with absolute paths so that any working directory can open them."""
    source = {name: getattr(stream, name) for name in FIELDS}
    if Path(source["data"]).exists():  # otherwise it is on the Hub, or missing, and the error should show it unchanged
        source["data"] = str(Path(source["data"]).absolute())
    for name in ("class_names", "vocabulary", "test_data"):
        if source.get(name) and Path(source[name]).exists():
            source[name] = str(Path(source[name]).absolute())
    return source


def data_or_labels(data: str | None, labels: str | None) -> str | None:
    """Return the value of --data or --labels; raise a ValueError if both are given."""
    if labels is None:
        return data
    if data:
        raise ValueError(f"--data is {data!r} and --labels is {labels!r}: the table names the images, so omit --data")
    if not labels.lower().endswith((".csv", ".tsv", ".jsonl")):
        raise ValueError(f"--labels is {labels!r}, expected a .csv file with the columns path,label")
    return labels


def check_source(source: Mapping[str, Any]) -> None:
    """Raise the errors that `open_source` would raise before it opens an image, without asking the Hub."""
    from dulbe_peft.data.folders import FolderSplit
    from dulbe_peft.data.hub import HUB_PREFIX
    from dulbe_peft.photos.data.roles import stream_splits

    if not source["data"].startswith(HUB_PREFIX):
        given: list[Any] = [source.get(name) for name in _SPLITS]
        splits, _, tests = stream_splits(*given, **_reading(source))
        for opener in (*splits.values(), *(tests or ())[1:]):
            if isinstance(opener, FolderSplit):
                opener.check()


def _reading(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: source[name] for name in _READING if source.get(name)}


def open_source(
    source: dict[str, Any],
    report: bool = True,
    notes: list[str] | None = None,
    look: Look | None = None,
    known: Collection[str] = (),
) -> tuple[LabelledImages, LabelledImages | None]:
    """Return the training images, and the test images or None.

    Args:
        source: the settings that `source_of` returns.
        report: whether to print the inventory.
        notes: a list to which the lines on problems are appended.
        look: a function that finds unreadable images, as in `open_stream_data`. By default, all images are decoded.
        known: learned classes, about which nothing is printed if they have few or no images here.
    """
    from dulbe_peft.photos.data.inventory import undecodable
    from dulbe_peft.photos.data.splits import draw_per_class, hold_out, open_stream_data
    from dulbe_peft.streams.protocols import rename_classes

    given: list[Any] = [source.get(name) for name in _SPLITS]
    given += [bool(source.get("strict")), look or undecodable]
    train, test, inventory = open_stream_data(*given, **_reading(source))
    counts = {
        split: {name: n for name, n in of.items() if name not in known} for split, of in inventory.counts.items()
    }
    summary, inventory = inventory.summary(), replace(inventory, counts=counts)
    if notes is not None:
        notes += [line.strip() for line in inventory.problems(most=len(inventory.unreadable)) if line]
    if report:
        print_once("\n".join([summary, *inventory.problems()]))
        if inventory.unreadable:
            print_once("unreadable images are left out and not counted above; --strict makes them an error")
        if train.features is not None and train.features.note is None:
            print_once(f"{source['data']} does not say which model its features are from: only their width is checked")
        if test is None and inventory.class_names:
            print_once(f"{source['data']} has no test images; --test-fraction 0.2 holds out a fifth of the images")
    names = source.get("class_names")
    if report and names is None and all(map(str.isdecimal, train.class_names)):
        print_once("the class names are numbers: --class-names FILE gives the classes names that a model can read")
    if names is not None:
        old_names = train.class_names
        train, test = rename_classes(train, names), None if test is None else rename_classes(test, names)
        renamed = list(zip(old_names, train.class_names, strict=True))
        pairs = ", ".join(f"{old!r} is {new!r}" for old, new in renamed[:3])
        if report:
            print_once(f"names from {names}: {pairs}" + (", ..." if len(old_names) > 3 else ""))
    fraction, count, seed = (source.get(name) for name in _DRAWS)
    if fraction is not None:
        train, test = hold_out(train, fraction, seed or 0, "validation")
    if count is not None:
        train = draw_per_class(train, count, seed or 0)
    if report and (fraction is not None or count is not None):
        tested = "" if test is None else f", testing on {len(test)}" + (" held-out ones" if fraction else "")
        print_once(f"training on {counted(len(train), 'image')}{tested}")
    return train, test


def open_images(data: str, split: str | None, class_names: str | None, strict: bool, look: Look) -> LabelledImages:
    """Open the images of one split.

    The split "" means that `data` is a folder of classes; None means the split "test" if `data` has it, and otherwise
    a folder of classes. Unreadable images are left out and printed, or raise an error if `strict`.
    """
    from dulbe_peft.data.readers import splits
    from dulbe_peft.photos.data.splits import open_split, readable
    from dulbe_peft.streams.protocols import rename_classes

    if split is None:
        names = splits(data) if Path(data).exists() else {"test"}
        split = "test" if "test" in names or None not in names else None
    images = open_split(data, split or None)
    parts, inventory = readable(data, {images.split or "images": images}, strict, look)
    if inventory.unreadable:
        print("\n".join([inventory.summary(), *inventory.problems()]), file=sys.stderr)
    (images,) = parts.values()
    return images if class_names is None else rename_classes(images, class_names)


def reopen_tests(
    tasks: Sequence[FinishedTask], known: KnownImages, renamed: Mapping[str, str]
) -> list[LabelledImages | None]:
    """Return the test images of each earlier task, found by their content, or None for a task whose images are gone.

    A line is printed for each such task. `renamed` maps the folder names of classes to their present names.
    """
    open_splits = cache(_open_splits)
    tests: list[LabelledImages | None] = []
    for number, task in enumerate(tasks, 1):
        test = None
        try:
            if task.source is None:
                raise ValueError("the run did not record where they came from")
            test = _find_tests(open_splits(json.dumps(task.source)), task.class_names, known, task.source, renamed)
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            print(f"the test images of task {number} are not used again: {error}", file=sys.stderr)
        tests.append(test)
    return tests


def _open_splits(source_json: str) -> list[LabelledImages]:
    """Return the splits of a task's data that may hold its test images; no image is opened."""
    from dulbe_peft.photos.data.roles import VALIDATION
    from dulbe_peft.photos.data.splits import open_split
    from dulbe_peft.streams.protocols import rename_classes

    source = json.loads(source_json)
    parts: list[LabelledImages] = []
    for data in filter(None, (source.get("test_data"), source["data"])):
        for split in dict.fromkeys((source["test_split"], "test", *VALIDATION, source["train_split"], None)):
            with suppress(OSError, ValueError):
                parts.append(open_split(data, split, **_reading(source)))
    parts = parts or [open_split(source["data"], source["test_split"], **_reading(source))]  # this raises the error
    names = source.get("class_names")
    return [rename_classes(part, names) for part in parts] if names else parts


def _find_tests(
    parts: Sequence[LabelledImages],
    names: Sequence[str],
    known: KnownImages,
    source: dict[str, Any],
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
    raise ValueError(f"the images in {source['data']} are not those that the task was tested on")


def tests_of(source: Mapping[str, Any] | None) -> list[str]:
    """The flags with which `evaluate` finds the test images of a task's source, as far as they lie apart and here.

    Those that a run held out lie among those that it learned.
    """
    from dulbe_peft.photos.data.roles import VALIDATION

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
