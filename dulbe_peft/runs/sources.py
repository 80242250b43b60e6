"""Where images come from: opened for a command, noted in a run's `sources.json`, and opened again later."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.utils.terminal import printable_lines

if TYPE_CHECKING:  # numpy and Pillow are imported by the commands that need them
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.runs.progress import FinishedTask

DATA_FIELDS = ("data", "train_split", "test_split", "test_fraction", "skip_unreadable", "class_names")
_DRAWS = ("validation_fraction", "images_per_class", "draw_seed")
FIELDS = (*DATA_FIELDS, *_DRAWS)


def source_of(settings: Any) -> dict[str, Any]:
    """What names a command's data, in a form that `open_source` opens from any working directory."""
    source = {name: getattr(settings, name) for name in FIELDS if hasattr(settings, name)}
    if Path(source["data"]).exists():  # else it is on the Hub, the demo's digits, or an error that shows it as it is
        source["data"] = str(Path(source["data"]).absolute())
    if source.get("class_names"):
        source["class_names"] = str(Path(source["class_names"]).absolute())
    return source


def open_source(
    source: dict[str, Any], report: bool = True, notes: list[str] | None = None
) -> tuple[LabelledImages, LabelledImages | None]:
    """Images to learn from, and to test on or None, for all commands; `notes` takes what is left out, line by line."""
    from dulbe_peft.data.splits import draw_per_class, hold_out, open_stream_data
    from dulbe_peft.streams.protocols import rename_classes

    fraction, skip = source.get("test_fraction"), bool(source.get("skip_unreadable"))
    train, test, found = open_stream_data(source["data"], source["train_split"], source["test_split"], fraction, skip)
    if notes is not None:
        notes += [line.strip() for line in found.problems() if line]
    if report:
        print_once("\n".join([found.summary(), *found.problems()]))
        if found.unreadable:
            print_once("the images that cannot be read are left out, as --skip-unreadable says, and not counted above")
        if test is None:
            print_once(f"{source['data']} has no test images; --test-fraction 0.2 holds a fifth of the images back")
    names = source.get("class_names")
    if names:
        train, test = rename_classes(train, names), None if test is None else rename_classes(test, names)
    fraction, count, seed = (source.get(name) for name in _DRAWS)
    if fraction is not None:
        train, test = hold_out(train, fraction, seed or 0, "validation")
    if count is not None:
        train = draw_per_class(train, count, seed or 0)
    if report and (fraction is not None or count is not None):
        tested = "" if test is None else f", tested on {len(test)}" + (" of the training images" if fraction else "")
        print_once(f"learned from {len(train)} images{tested}")
    return train, test


def open_split(data: str, split: str | None, class_names: str | None, skip_unreadable: bool) -> LabelledImages:
    """The images of one split, None: of a folder of classes; what is left out as unreadable is printed."""
    from dulbe_peft.data.inventory import readable_images
    from dulbe_peft.data.splits import load_split
    from dulbe_peft.streams.protocols import rename_classes

    images = load_split(data, split)
    if skip_unreadable:
        images, found = readable_images(images)
        print("\n".join([found.summary(), *found.problems()]), file=sys.stderr)
    return rename_classes(images, class_names) if class_names else images


def reopen_tests(tasks: Sequence[FinishedTask], look: bool) -> list[LabelledImages | None]:
    """The test images of each earlier task, None where they are gone, which is printed; `look` is for fingerprints."""
    from dulbe_peft.data.fingerprint import fingerprint

    opened: dict[str, LabelledImages | None] = {}
    tests: list[LabelledImages | None] = []
    for number, task in enumerate(tasks, 1):
        test, names, source = None, task.class_names, task.source
        try:
            if source is None:
                raise ValueError("the run did not note where they came from")
            if names and source["test"] is not None:
                key = repr({name: source[name] for name in FIELDS if name in source})
                if key not in opened:
                    opened[key] = open_source(source, report=False)[1]
                images = opened[key]
                found = None if images is None else images.select(names)
                if found is None or fingerprint(found, look=look) != source["test"]:
                    raise ValueError(f"those in {source['data']} are not those that the task was tested on")
                test = found
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            print(f"the test images of task {number} are not used again: {error}", file=sys.stderr)
        tests.append(test)
    return tests


def print_once(text: str) -> None:
    """Print in the first of several processes alone, also before they have found each other."""
    if os.environ.get("RANK", "0") == "0":
        print(printable_lines(text), flush=True)
