"""What the predictions for the test images amount to, class by class."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dulbe_peft.metrics.evaluation import ImageResult

_MOST_FOLDERS = 3  # that a sentence names


@dataclass(frozen=True)
class ClassAccuracy:
    """A class: its test images, the fraction named right, what it lost since its best, and what it is taken for."""

    name: str
    images: int
    accuracy: float
    forgetting: float | None
    taken_for: list[tuple[str, int]]


def class_accuracies(predictions: Sequence[ImageResult], forgetting: dict[str, float]) -> list[ClassAccuracy]:
    """A row for each class, the worst known first; `forgetting` is what each class has lost since it was best."""
    groups: dict[str, list[ImageResult]] = {}
    for row in predictions:
        groups.setdefault(row.true, []).append(row)
    table = [
        ClassAccuracy(
            name,
            len(rows),
            sum(row.right for row in rows) / len(rows),
            forgetting.get(name),
            Counter(row.predicted for row in rows if not row.right).most_common(),
        )
        for name, rows in groups.items()
    ]
    return sorted(table, key=lambda row: row.accuracy)


def confusion_matrix(predictions: Sequence[ImageResult], classes: list[str]) -> tuple[list[str], list[list[int]]]:
    """How many images of each of some classes are taken for which class.

    The columns are `classes`, and then the others that their images are taken for most, at most as many again. The
    counts have one row a class and one entry a column.
    """
    pairs = Counter((row.true, row.predicted) for row in predictions)
    others: Counter[str] = Counter()
    for (true, predicted), count in pairs.items():
        if true in classes and predicted not in classes:
            others[predicted] += count
    columns = [*classes, *(name for name, _ in others.most_common(len(classes)))]
    return columns, [[pairs[name, column] for column in columns] for name in classes]


def data_name(predictions: Sequence[ImageResult]) -> str | None:
    """The folders or files that the test images are in, the last two parts; None where unknown, or many."""
    found = list(dict.fromkeys(map(_place, predictions)))
    if len(found) > _MOST_FOLDERS:  # the folders of renamed classes
        found = list(dict.fromkeys(os.path.dirname(place) for place in found))
    if len(found) > _MOST_FOLDERS or any(os.path.dirname(place) == place for place in found):
        return None
    parts = [Path(place).parts for place in found]
    return " and ".join(dict.fromkeys("/".join(p[-2:]) if len(p) > 3 else str(Path(*p)) for p in parts)) or None


def _place(row: ImageResult) -> str:
    """The file that holds an image among others, or the folder around the folder of its class; "" where unknown."""
    packed = re.fullmatch(r"(.+)\[\d+\]", row.image)
    if packed:
        return packed[1]
    folder = os.path.dirname(row.image.replace(os.sep, "/"))
    around, found, _ = f"{folder}/".rpartition(f"/{row.true}/")
    return around if found else folder
