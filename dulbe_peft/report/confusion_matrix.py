"""The confusion matrix: which classes are taken for which, with classes side by side that are mixed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from dulbe_peft.metrics.evaluation import ImageResult


@dataclass(frozen=True)
class ConfusionMatrix:
    """All classes in the order of the picture, and counts[i, j] images of class i that are taken for class j."""

    classes: list[str]
    counts: np.ndarray

    @property
    def cells(self) -> list[tuple[int, int, int, float]]:
        """Row, column, images, and their part of the row's images, of every cell that is not empty."""
        totals = self.counts.sum(axis=1)
        return [
            (int(i), int(j), int(self.counts[i, j]), float(self.counts[i, j] / totals[i]))
            for i, j in np.argwhere(self.counts)
        ]

    @property
    def mistakes(self) -> list[tuple[str, str, int, int]]:
        """Class, what it is taken for, how many of its images, and of how many; the most frequent first."""
        totals = self.counts.sum(axis=1).tolist()
        pairs = [(self.classes[i], self.classes[j], n, totals[i]) for i, j, n, _ in self.cells if i != j]
        return sorted(pairs, key=lambda pair: -pair[2])


def confusion_matrix(predictions: Sequence[ImageResult]) -> ConfusionMatrix:
    """The matrix of all classes that are shown or answered, similar ones together."""
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
        order = leaves_list(linkage(squareform(distances), "average", optimal_ordering=len(names) <= 500))
        names, counts = [names[i] for i in order], counts[np.ix_(order, order)]
    return ConfusionMatrix(names, counts)
