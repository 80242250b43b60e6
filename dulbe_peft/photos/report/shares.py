"""Summarize predictions for test images: accuracy with intervals, by class and by probability, and the confusion
matrix.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypeVar

import numpy as np
from scipy.special import stdtrit

from dulbe_peft.metrics.evaluation import ImageResult
from dulbe_peft.training.estimating import NORMAL, wilson
from dulbe_peft.utils.terminal import counted

K = TypeVar("K")
_BINS = 10
_MOST_CONFUSIONS = 3  # predicted classes that the row of a class lists
_THRESHOLDS = (0.5, 0.8, 0.9, 0.95)
_LIMITS = [*(n / 100 for n in range(99)), *(n / 1000 for n in range(990, 1000))]  # 0.00 to 0.98, 0.990 to 0.999
_LEAST = 20  # with fewer predictions, their accuracy says too little


@dataclass(frozen=True)
class Share:
    """A count of images classified correctly, printed as 6.7 % (1 of 15; 95 % interval 1.2 to 29.8).

    If the images have groups, `items` is their number, and `worth` how many independent images tell as much.
    """

    right: int
    images: int
    items: int | None = None
    worth: float | None = None

    @classmethod
    def of(cls, answers: Sequence[ImageResult]) -> Self:
        """Count the images that the first classifier got right."""
        return cls.counted([(row, row.right) for row in answers])

    @classmethod
    def counted(cls, rows: Sequence[tuple[ImageResult, bool]]) -> Self:
        """Count the images for which the second entry is true. An image without a group is an item of its own."""
        right = sum(hit for _, hit in rows)
        if not any(row.group for row, _ in rows):
            return cls(right, len(rows))
        items: dict[object, list[bool]] = {}
        for place, (row, hit) in enumerate(rows):
            items.setdefault(row.group or place, []).append(hit)
        return cls(right, len(rows), len(items), _worth([*items.values()]))

    @property
    def value(self) -> float:
        return self.right / self.images

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Return Wilson's 95 % interval, with `worth` as the number of images if they have groups."""
        _, low, high = wilson(self.value, self.images if self.worth is None else self.worth)
        return low, high

    def __str__(self) -> str:
        low, high = (f"{100 * end:.1f}" for end in self.interval)
        counts = f"{self.right:,} of {self.images:,}" + (f", {counted(self.items, 'item')}" if self.items else "")
        return f"{100 * self.value:.1f} % ({counts}; 95 % interval {low} to {high})"


def _worth(items: Sequence[Sequence[bool]]) -> float:
    """Return how many independent images tell as much about the accuracy as the images of some items.

    It is the variance of a share of independent images over that of the share of right images by items, a ratio of
    sums (Cochran, Sampling Techniques, 1977, 9A.1), with Student's quantile for few items (Korn and Graubard, 1998).
    If all images are right, or all wrong, only the number of items counts.
    """
    images, number = sum(map(len, items)), len(items)
    share = sum(map(sum, items)) / images
    if number < 2 or share in (0, 1):
        return float(number)
    variance = number / (number - 1) * sum((sum(of) - share * len(of)) ** 2 for of in items) / images**2
    if not variance:
        return float(number)
    few = (NORMAL / float(stdtrit(number - 1, 0.975))) ** 2
    return max(1.0, min(float(images), few * share * (1 - share) / variance))


def item_of(row: ImageResult) -> object:
    """Return the item of a test image: its group, or the image itself."""
    return row.group or (row.task, row.position)


def divided(rows: Sequence[ImageResult], key: Callable[[ImageResult], K]) -> dict[K, list[ImageResult]]:
    """Return the rows with each key, in their order."""
    parts: dict[K, list[ImageResult]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return parts


@dataclass(frozen=True)
class ClassRow:
    """The row of a class: recall, precision, forgetting, what it is mistaken for, and its number of training images.

    Precision is None if the class was never predicted.
    """

    name: str
    recall: Share
    precision: Share | None
    forgetting: float | None
    mistaken_for: str
    learned: int | None


def class_rows(
    predictions: Sequence[ImageResult], forgetting: Mapping[str, float], learned: Mapping[str, int]
) -> list[ClassRow]:
    """Return a row for each class with test images, the least accurate first."""
    table, predicted = [], divided(predictions, lambda row: row.predicted)
    for name, rows in divided(predictions, lambda row: row.true).items():
        wrong, recall = Counter(row.predicted for row in rows if not row.right).most_common(), Share.of(rows)
        mistaken_for = listed([f"{other} ({count})" for other, count in wrong], _MOST_CONFUSIONS)
        precision = Share.of(predicted[name]) if name in predicted else None
        table.append(ClassRow(name, recall, precision, forgetting.get(name), mistaken_for, learned.get(name) or None))
    return sorted(table, key=lambda row: row.recall.value)


def listed(words: Sequence[str], most: int) -> str:
    """Join the first words of a list, and say how many more there are."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


@dataclass(frozen=True)
class ConfusionMatrix:
    """All classes in the order of the picture, and counts[i, j], the number of images of class i predicted as j."""

    classes: list[str]
    counts: np.ndarray

    @property
    def cells(self) -> list[tuple[int, int, int, float]]:
        """Return (row, column, count, share of the row's images) for every cell that is not empty."""
        parts = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return [(i, j, int(self.counts[i, j]), float(parts[i, j])) for i, j in np.argwhere(self.counts).tolist()]

    @property
    def mistakes(self) -> list[tuple[str, str, int, int]]:
        """Return (class, predicted class, count, images of the class) for every confusion, the most frequent first."""
        totals = self.counts.sum(axis=1).tolist()
        pairs = [(self.classes[i], self.classes[j], n, totals[i]) for i, j, n, _ in self.cells if i != j]
        return sorted(pairs, key=lambda pair: -pair[2])


def confusion_matrix(predictions: Sequence[ImageResult]) -> ConfusionMatrix:
    """Return the matrix of all true and predicted classes. Classes that are often confused stand side by side."""
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
    """Return the mean probability and the accuracy of the predictions in each tenth of the probabilities."""
    bins = divided(predictions, lambda row: min(int(row.probability * _BINS), _BINS - 1))
    return [(sum(row.probability for row in rows) / len(rows), Share.of(rows)) for _, rows in sorted(bins.items())]


def above_thresholds(predictions: Sequence[ImageResult]) -> list[tuple[float, float, Share]]:
    """Return (threshold, share of images above it, their accuracy) for a few thresholds of the probability."""
    parts = [(limit, [row for row in predictions if row.probability > limit]) for limit in _THRESHOLDS]
    return [(limit, len(above) / len(predictions), Share.of(above)) for limit, above in parts if above]


def lowest_threshold(predictions: Sequence[ImageResult], wanted: float) -> tuple[float, Share] | None:
    """Return the lowest threshold above which the accuracy is at least `wanted`, and the accuracy above it.

    Thresholds have as many digits as the page prints, so that the printed accuracy belongs to the printed threshold.
    Return None if no threshold leaves enough predictions.
    """
    for limit in _LIMITS:
        above = [row for row in predictions if row.probability > limit]
        if len(above) >= min(_LEAST, len(predictions)) and sum(row.right for row in above) >= wanted * len(above):
            return limit, Share.of(above)
    return None


def more_images(rows: Sequence[ClassRow]) -> tuple[bool | None, Share, Share, int] | None:
    """Compare the accuracy of classes with few and with many training images.

    Returns:
        None if all classes have equally many training images; otherwise, whether classes with many are more accurate
        (None if the difference may be chance), the accuracy of classes with few, the accuracy of classes with many,
        and the largest number of images that counts as few.
    """
    taught = [row for row in rows if row.learned]
    sizes = sorted({row.learned or 0 for row in taught})
    if len(sizes) < 2:
        return None
    from scipy.stats import mannwhitneyu  # takes half a second

    middle = min(float(np.median([row.learned or 0 for row in taught])), sizes[-2])
    groups = [[row for row in taught if ((row.learned or 0) > middle) == more] for more in (False, True)]
    few, many = (Share(sum(r.recall.right for r in group), sum(r.recall.images for r in group)) for group in groups)
    values = [[row.recall.value for row in group] for group in groups]
    clear = mannwhitneyu(*values).pvalue < 0.05
    return (many.value > few.value if clear else None), few, many, int(middle)
