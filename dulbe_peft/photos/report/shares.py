"""What the predictions for the test images amount to: shares with their intervals, by class and by probability, and
the confusion matrix.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from dulbe_peft.metrics.evaluation import ImageResult

_BINS = 10
_NAMED = 3  # classes that a class is taken for
_THRESHOLDS = (0.5, 0.8, 0.9, 0.95)
_LIMITS = [*(n / 100 for n in range(99)), *(n / 1000 for n in range(990, 1000))]  # 0.00 to 0.98, 0.990 to 0.999
_LEAST = 20  # answers, below which a share of right ones promises nothing


@dataclass(frozen=True)
class Share:
    """How many of some images are named right, shown as 6.7 % (1 of 15; 95 % interval 1.2 to 29.8)."""

    right: int
    images: int

    @classmethod
    def of(cls, answers: Sequence[ImageResult]) -> Self:
        return cls(sum(row.right for row in answers), len(answers))

    @property
    def value(self) -> float:
        return self.right / self.images

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 %."""
        from scipy.stats import binomtest

        found = binomtest(self.right, self.images).proportion_ci(method="wilson")
        return float(found.low), float(found.high)

    def __str__(self) -> str:
        low, high = (f"{100 * end:.1f}" for end in self.interval)
        counts = f"{self.right:,} of {self.images:,}"
        return f"{100 * self.value:.1f} % ({counts}; 95 % interval {low} to {high})"


@dataclass(frozen=True)
class ClassRow:
    """A class: how many of its images are named right, and how many of the answers with its name are; what it has
    lost since its best, what it is taken for, and how many images taught it.
    """

    name: str
    share: Share
    said: Share | None
    forgetting: float | None
    taken_for: str
    learned: int | None


def class_rows(
    predictions: Sequence[ImageResult], forgetting: Mapping[str, float], learned: Mapping[str, int]
) -> list[ClassRow]:
    """A row for each class with test images, the worst known first."""
    groups: dict[str, list[ImageResult]] = {}
    for row in predictions:
        groups.setdefault(row.true, []).append(row)
    table, said = [], Counter(row.predicted for row in predictions)
    for name, rows in groups.items():
        wrong, share = Counter(row.predicted for row in rows if not row.right).most_common(), Share.of(rows)
        taken_for = listed([f"{other} ({count})" for other, count in wrong], _NAMED)
        answers = Share(share.right, said[name]) if said[name] else None
        table.append(ClassRow(name, share, answers, forgetting.get(name), taken_for, learned.get(name) or None))
    return sorted(table, key=lambda row: row.share.value)


def listed(words: Sequence[str], most: int) -> str:
    """The first words of a list, and how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@dataclass(frozen=True)
class ConfusionMatrix:
    """All classes in the order of the picture, and counts[i, j] images of class i that are taken for class j."""

    classes: list[str]
    counts: np.ndarray

    @property
    def cells(self) -> list[tuple[int, int, int, float]]:
        """Row, column, images, and their part of the row's images, of every cell that is not empty."""
        parts = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return [(i, j, int(self.counts[i, j]), float(parts[i, j])) for i, j in np.argwhere(self.counts).tolist()]

    @property
    def mistakes(self) -> list[tuple[str, str, int, int]]:
        """Class, what it is taken for, how many of its images, and of how many; the most frequent first."""
        totals = self.counts.sum(axis=1).tolist()
        pairs = [(self.classes[i], self.classes[j], n, totals[i]) for i, j, n, _ in self.cells if i != j]
        return sorted(pairs, key=lambda pair: -pair[2])


def confusion_matrix(predictions: Sequence[ImageResult]) -> ConfusionMatrix:
    """The matrix of all classes that are shown or answered, with those side by side that are mixed up."""
    pairs = Counter((row.true, row.predicted) for row in predictions)
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    place = {name: number for number, name in enumerate(names)}
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    for (true, predicted), count in pairs.items():
        counts[place[true], place[predicted]] = count
    if len(names) > 2:
        parts = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        distances = 1 - (parts + parts.T) / 2
        np.fill_diagonal(distances, 0)
        from scipy.cluster.hierarchy import leaves_list, linkage
        from scipy.spatial.distance import squareform

        order = leaves_list(linkage(squareform(distances), "average", optimal_ordering=len(names) <= 500))
        names, counts = [names[i] for i in order], counts[np.ix_(order, order)]
    return ConfusionMatrix(names, counts)


def reliability(predictions: Sequence[ImageResult]) -> list[tuple[float, Share]]:
    """For each tenth of the probabilities that has answers: their mean probability, and how many are right."""
    bins: dict[int, list[ImageResult]] = {}
    for row in predictions:
        bins.setdefault(min(int(row.probability * _BINS), _BINS - 1), []).append(row)
    return [(sum(row.probability for row in rows) / len(rows), Share.of(rows)) for _, rows in sorted(bins.items())]


def sure_answers(predictions: Sequence[ImageResult]) -> list[tuple[float, float, Share]]:
    """For some probabilities: the part of the images that are answered with more, and how many of those are right."""
    found = [(limit, [row for row in predictions if row.probability > limit]) for limit in _THRESHOLDS]
    return [(limit, len(sure) / len(predictions), Share.of(sure)) for limit, sure in found if sure]


def surest(predictions: Sequence[ImageResult], wanted: float) -> tuple[float, Share] | None:
    """Return the lowest of `_LIMITS` above which a share of the answers, `wanted`, is right, and these answers.

    The limits are numbers as people read them, so that whoever answers only above the one that is printed has the
    share that is printed. None where no limit leaves enough answers.
    """
    for limit in _LIMITS:
        sure = [row for row in predictions if row.probability > limit]
        if len(sure) >= min(_LEAST, len(predictions)) and sum(row.right for row in sure) >= wanted * len(sure):
            return limit, Share.of(sure)
    return None


def more_images(rows: Sequence[ClassRow]) -> tuple[bool | None, Share, Share, int] | None:
    """Whether classes with more training images are known better: those of at most so many, those of more, and how
    many that is. None in place of a truth value: it may be chance. None for all: the classes have equally many.
    """
    from scipy.stats import mannwhitneyu

    counted = [row for row in rows if row.learned]
    sizes = sorted({row.learned or 0 for row in counted})
    if len(sizes) < 2:
        return None
    middle = min(float(np.median([row.learned or 0 for row in counted])), sizes[-2])
    groups = [[row for row in counted if ((row.learned or 0) > middle) == more] for more in (False, True)]
    few, many = (Share(sum(r.share.right for r in group), sum(r.share.images for r in group)) for group in groups)
    values = [[row.share.value for row in group] for group in groups]
    clear = mannwhitneyu(*values).pvalue < 0.05
    return (many.value > few.value if clear else None), few, many, int(middle)
