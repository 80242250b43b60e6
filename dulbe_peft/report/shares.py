"""What the predictions for the test images amount to: shares with their intervals, by class and by probability."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scipy.stats import binomtest

from dulbe_peft.metrics.evaluation import ImageResult

_MOST_FOLDERS = 3  # that a sentence names
_BINS = 10
_THRESHOLDS = (0.5, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Share:
    """How many of some images are named right.

    >>> str(Share(1, 15))
    '6.7 % (1 of 15; 95 % interval 1.2 to 29.8)'
    """

    right: int
    images: int

    @property
    def value(self) -> float:
        """The fraction."""
        return self.right / self.images

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 %."""
        found = binomtest(self.right, self.images).proportion_ci(method="wilson")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        low, high = (f"{100 * end:.1f}" for end in self.interval)
        counts = f"{self.right:,} of {self.images:,}"
        return f"{100 * self.value:.1f} % ({counts}; 95 % interval {low} to {high})"


@dataclass(frozen=True)
class ClassRow:
    """A class: its share, what it has lost since its best, what it is taken for, and how many images taught it."""

    name: str
    share: Share
    forgetting: float | None
    taken_for: list[tuple[str, int]]
    learned: int | None


def class_rows(
    predictions: Sequence[ImageResult], forgetting: Mapping[str, float], learned: Mapping[str, int]
) -> list[ClassRow]:
    """A row for each class with test images, the worst known first."""
    groups: dict[str, list[ImageResult]] = {}
    for row in predictions:
        groups.setdefault(row.true, []).append(row)
    table = []
    for name, rows in groups.items():
        wrong = Counter(row.predicted for row in rows if not row.right)
        share = Share(len(rows) - wrong.total(), len(rows))
        table.append(ClassRow(name, share, forgetting.get(name), wrong.most_common(), learned.get(name)))
    return sorted(table, key=lambda row: row.share.value)


def reliability(predictions: Sequence[ImageResult]) -> list[tuple[float, Share]]:
    """For each tenth of the probabilities that has answers: their mean probability, and how many are right."""
    bins: dict[int, list[ImageResult]] = {}
    for row in predictions:
        bins.setdefault(min(int(row.probability * _BINS), _BINS - 1), []).append(row)
    return [
        (sum(row.probability for row in rows) / len(rows), Share(sum(row.right for row in rows), len(rows)))
        for _, rows in sorted(bins.items())
    ]


def sure_answers(predictions: Sequence[ImageResult]) -> list[tuple[float, float, Share]]:
    """For some probabilities: the part of the images that are answered with more, and how many of those are right."""
    found = []
    for threshold in _THRESHOLDS:
        sure = [row for row in predictions if row.probability > threshold]
        if sure:
            found.append((threshold, len(sure) / len(predictions), Share(sum(row.right for row in sure), len(sure))))
    return found


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
