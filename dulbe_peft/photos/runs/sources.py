"""Where images come from: opened for a command, noted in a run's `sources.json`, and opened again later."""

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

_SPLITS = (
    "data",
    "train_split",
    "test_split",
    "test_fraction",
    "test_data",
)  # first of `open_stream_data`
_READING = ("vocabulary", "image_column", "label_column", "path_column", "leave_out")  # arguments of `load_data`
DATA_FIELDS = (*_SPLITS, "strict", "class_names", *_READING)
_DRAWS = ("validation_fraction", "images_per_class", "draw_seed")
FIELDS = (*DATA_FIELDS, *_DRAWS)


def source_of(stream: StreamArguments) -> dict[str, Any]:
    """What names a command's data, in a form that `open_source` opens from any working directory."""
    source = {name: getattr(stream, name) for name in FIELDS}
    if Path(source["data"]).exists():  # else it is on the Hub, the demo's digits, or an error that shows it as it is
        source["data"] = str(Path(source["data"]).absolute())
    for name in ("class_names", "vocabulary", "test_data"):
        if source.get(name) and Path(source[name]).exists():
            source[name] = str(Path(source[name]).absolute())
    return source


def data_or_labels(data: str | None, labels: str | None) -> str | None:
    """What --data or --labels names, of which one is given at most."""
    if labels is None:
        return data
    if data:
        raise ValueError(f"--data is {data!r} and --labels {labels!r}: the table names the images, so give it alone")
    if not labels.lower().endswith((".csv", ".tsv", ".jsonl")):
        raise ValueError(f"--labels is {labels!r}, expected a .csv file with the columns path,label")
    return labels


def check_source(source: Mapping[str, Any]) -> None:
    """Raise what `open_source` raises before it opens an image; the Hub is not asked."""
    from dulbe_peft.data.folders import ImageFolder, folder_of_classes
    from dulbe_peft.data.hub import HUB_PREFIX
    from dulbe_peft.photos.data.roles import stream_splits

    if not source["data"].startswith(HUB_PREFIX):
        given: list[Any] = [source.get(name) for name in _SPLITS]
        found, _, tests = stream_splits(*given, **_reading(source))
        for opens in (*found.values(), *(tests or ())[1:]):
            if getattr(opens, "func", None) is ImageFolder:
                folder_of_classes(*opens.args)


def _reading(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: source[name] for name in _READING if source.get(name)}


def open_source(
    source: dict[str, Any],
    report: bool = True,
    notes: list[str] | None = None,
    look: Look | None = None,
    known: Collection[str] = (),
) -> tuple[LabelledImages, LabelledImages | None]:
    """Images to learn from, and to test on or None, for all commands; `notes` takes what is left out, line by line.

    `look` as in `open_stream_data`; None decodes. Few images, or no tests, of `known` classes are not spoken of.
    """
    from dulbe_peft.photos.data.inventory import undecodable
    from dulbe_peft.photos.data.splits import draw_per_class, hold_out, open_stream_data
    from dulbe_peft.streams.protocols import rename_classes

    given: list[Any] = [source.get(name) for name in _SPLITS]
    given += [bool(source.get("strict")), look or undecodable]
    train, test, found = open_stream_data(*given, **_reading(source))
    counts = {split: {name: of[name] for name in of if name not in known} for split, of in found.counts.items()}
    summary, found = found.summary(), replace(found, counts=counts)
    if notes is not None:
        notes += [line.strip() for line in found.problems(most=len(found.unreadable)) if line]
    if report:
        print_once("\n".join([summary, *found.problems()]))
        if found.unreadable:
            print_once("the images that cannot be read are left out, and not counted above; --strict stops there")
        if train.features is not None and train.features.note is None:
            print_once(f"{source['data']} does not say which model made it: its width alone is compared")
        if test is None and found.class_names:
            print_once(f"{source['data']} has no test images; --test-fraction 0.2 holds a fifth of the images back")
    names = source.get("class_names")
    if report and names is None and all(map(str.isdecimal, train.class_names)):
        print_once("the classes are called by numbers: --class-names FILE gives them names that a model reads")
    if names is not None:
        old = train.class_names
        train, test = rename_classes(train, names), None if test is None else rename_classes(test, names)
        pairs = ", ".join(f"{one!r} is {name!r}" for one, name in list(zip(old, train.class_names, strict=True))[:3])
        if report:
            print_once(f"names of {names}: {pairs}" + (", ..." if len(old) > 3 else ""))
    fraction, count, seed = (source.get(name) for name in _DRAWS)
    if fraction is not None:
        train, test = hold_out(train, fraction, seed or 0, "validation")
    if count is not None:
        train = draw_per_class(train, count, seed or 0)
    if report and (fraction is not None or count is not None):
        tested = "" if test is None else f", tested on {len(test)}" + (" of the training images" if fraction else "")
        print_once(f"learned from {counted(len(train), 'image')}{tested}")
    return train, test


def open_images(data: str, split: str | None, class_names: str | None, strict: bool, look: Look) -> LabelledImages:
    """The images of one split; of "", a folder of classes; of None, the split "test" where there may be one.

    What cannot be read is left out and printed, or raised where `strict`.
    """
    from dulbe_peft.data.readers import splits
    from dulbe_peft.photos.data.splits import open_split, readable
    from dulbe_peft.streams.protocols import rename_classes

    if split is None:
        names = splits(data) if Path(data).exists() else {"test"}
        split = "test" if "test" in names or None not in names else None
    images = open_split(data, split or None)
    parts, found = readable(data, {images.split or "images": images}, strict, look)
    if found.unreadable:
        print("\n".join([found.summary(), *found.problems()]), file=sys.stderr)
    (images,) = parts.values()
    return images if class_names is None else rename_classes(images, class_names)


def reopen_tests(
    tasks: Sequence[FinishedTask], known: KnownImages, renamed: Mapping[str, str]
) -> list[LabelledImages | None]:
    """The test images of each earlier task, found by content; None where they are gone, which is printed.

    `renamed` says what their classes, by the names of their folders, are called now.
    """
    opened = cache(_where_tests_are)
    tests: list[LabelledImages | None] = []
    for number, task in enumerate(tasks, 1):
        test = None
        try:
            if task.source is None:
                raise ValueError("the run did not note where they came from")
            test = _found(opened(json.dumps(task.source)), task.class_names, known, task.source, renamed)
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            print(f"the test images of task {number} are not used again: {error}", file=sys.stderr)
        tests.append(test)
    return tests


def _where_tests_are(noted: str) -> list[LabelledImages]:
    """The splits of a task's data, as JSON, in which its test images may stand; no image is looked at."""
    from dulbe_peft.photos.data.roles import VALIDATION
    from dulbe_peft.photos.data.splits import open_split
    from dulbe_peft.streams.protocols import rename_classes

    source = json.loads(noted)
    parts: list[LabelledImages] = []
    for data in filter(None, (source.get("test_data"), source["data"])):
        for split in dict.fromkeys((source["test_split"], "test", *VALIDATION, source["train_split"], None)):
            with suppress(OSError, ValueError):
                parts.append(open_split(data, split, **_reading(source)))
    parts = parts or [open_split(source["data"], source["test_split"], **_reading(source))]  # raises what is wrong
    names = source.get("class_names")
    return [rename_classes(part, names) for part in parts] if names else parts


def _found(
    parts: Sequence[LabelledImages],
    names: Sequence[str],
    known: KnownImages,
    source: dict[str, Any],
    renamed: Mapping[str, str],
) -> LabelledImages | None:
    """The images of some classes that were tested on, all of them; None where there were none."""
    import numpy as np

    from dulbe_peft.data.known import compared

    if not any(known.tested.get(name) for name in names):
        if known.complete:
            return None
        raise ValueError("this learner has no notes of its images")
    for part in parts:
        found, _, gone = compared(part, known.tested, names, renamed)
        if not gone:
            return part.at(list(found), np.array([names.index(name) for name in found.values()]), names)
    raise ValueError(f"those in {source['data']} are not those that the task was tested on")


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
    """The images to learn from without those that were learned before, and copies; what is left out is printed."""
    rows, twice = known.new_rows(images)
    for reason, which in twice.items():
        name, learned = images.item_name(which[0]), known.class_of().get(images.contents()[which[0]] or b"")
        was = f", learned as {learned!r} before" if reason == "of another class" else ""
        print_once(f"left out, for they would count twice: {len(which)} {reason}, such as {name}{was}{advice}")
    if not known.complete:
        print_once("this learner has no notes of its images: whether these are new is not known")
    return images.at(rows)


def say_leaks(train: LabelledImages, test: LabelledImages | None, known: KnownImages) -> None:
    """Print how many images to learn from were tested on in an earlier task, or the other way round."""
    tested = {content for contents in known.tested.values() for content in contents}
    for images, others, what in (
        (train, tested, "to learn from stood in the tests of an earlier task"),
        (test, set(known.class_of()), "to test on stood in the training images of an earlier task"),
    ):
        rows = [] if images is None else [row for row, content in enumerate(images.contents()) if content in others]
        if images is not None and rows:
            name = images.item_name(rows[0])
            print_once(f"{counted(len(rows), 'image')} {what}, such as {name}, so the accuracy on them says too much")
