"""What a published protocol fixes beside its settings: the names of the classes, counts, and a figure to meet first.

A run that follows a protocol checks its data and its pristine model against the published numbers before it trains.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.data.names import check_class_names, spelled_as
from dulbe_peft.data.samples import carried_class_names, dataset_labels
from dulbe_peft.data.subset import ClassSubset
from dulbe_peft.utils.files import read_lines


def rename_classes(dataset: Any, path: str | Path) -> ClassSubset:
    """A data set whose classes have the names of a text file; their order and labels stay as they are.

    Args:
        dataset: a data set that carries class names, such as folders that are called by numbers.
        path: text file in UTF-8. A line is `old name`, a tab and `new name`. Or no line has a tab, and there is one
            new name for each class of the data set, in its order. Lines for classes that are not there are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a class has no line, there are as many names as classes neither, or names are double or blank.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"class names {str(path)!r} is no file")
    lines = read_lines(file)
    old = carried_class_names(dataset)
    if any("\t" in line for line in lines):
        pairs = {name.strip(): new.strip() for name, _, new in (line.partition("\t") for line in lines)}
        old = spelled_as(old, pairs)
        absent = [name for name in old if name not in pairs]
        if absent:
            raise ValueError(f"{file} has no line for the class {absent[0]!r} ({len(absent)} such classes)")
        new = [pairs[name] for name in old]
    elif len(lines) == len(old):
        new = lines
    else:
        raise ValueError(f"{file} has {len(lines)} names, the data has {len(old)} classes")
    labels = dataset_labels(dataset)
    return ClassSubset(dataset, np.arange(len(labels)), labels, check_class_names(new), labels)


def check_counts(
    train: Any, test: Any, classes: int | None = None, images: int | None = None, test_images: int | None = None
) -> None:
    """Raise a `ValueError` where a stream's data has other numbers than its protocol.

    Args:
        train: images to learn from, with class names.
        test: images to test on, or None.
        classes: how many classes there must be; None: any number.
        images: how many images there must be to learn from.
        test_images: how many to test on.
    """
    found = {
        "classes": (len(carried_class_names(train)), classes),
        "images to learn from": (len(train), images),
        "images to test on": (0 if test is None else len(test), test_images),
    }
    wrong = [
        f"{count} {what}, expected {expected}"
        for what, (count, expected) in found.items()
        if expected not in (None, count)
    ]
    if wrong:
        raise ValueError(f"the data is not the one of the protocol: it has {'; '.join(wrong)}")


def check_zero_shot(found: float | None, expected: float, tolerance: float) -> None:
    """Raise a `ValueError` where the pristine model's accuracy is not the published one: something differs.

    Args:
        found: top-1 accuracy over all classes, in [0, 1]; None where nothing could be tested.
        expected: the published accuracy, in percent.
        tolerance: how far `found` may be from it, in points of percent.
    """
    if found is None:
        raise ValueError(
            f"expected_zero_shot is {expected} %, but there is none: it needs test images of all tasks and a model "
            "that reads texts"
        )
    if abs(100 * found - expected) > tolerance:
        raise ValueError(
            f"zero-shot accuracy over all classes is {100 * found:.2f} %, expected {expected} % within {tolerance}: "
            "the model, the prompts, the class names or the images are not those of the protocol"
        )
