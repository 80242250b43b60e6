"""One answer for each item or event, from the mean of its photographs' log-probabilities."""

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dulbe_peft.data.columns import clock
from dulbe_peft.metrics.prediction import Prediction
from dulbe_peft.utils import files
from dulbe_peft.utils.terminal import printable

LEAST = 1e-30  # the smallest probability whose logarithm counts, so that no photograph excludes a class
HEADER = ("group", "predicted", "probability", "images", "agreeing", "first", "last", "site")


class ItemAnswers:
    """The answers of items, which are collected photograph by photograph.

    Args:
        item_of: Name of an image -> the name of its group.
        taken: Name of an image -> when it was taken, in seconds of the camera's clock since 1970, or None.
        sites: Name of an image -> where it was taken.
        top_k: How many classes an answer has.
    """

    def __init__(
        self, item_of: Mapping[str, str], taken: Mapping[str, float | None], sites: Mapping[str, str], top_k: int
    ) -> None:
        self._item_of, self._taken, self._sites, self._top_k = item_of, taken, sites, top_k
        self._logs: dict[str, defaultdict[str, float]] = {}
        self._rows: dict[str, list[tuple[str, str, bool]]] = {}  # image, its best class, and whether it is known
        self._counted = set[str]()  # files, because a photograph that is given by two paths counts once

    def add(self, row: Prediction) -> Prediction:
        """Add a prediction with the probabilities of all classes, and return it with only its group."""
        item, file = self._item_of[row.image], os.path.realpath(row.image)
        if file in self._counted:
            return replace(row, classes=(), probabilities=(), group=item)
        self._counted.add(file)
        sums = self._logs.setdefault(item, defaultdict(float))
        for name, probability in zip(row.classes, row.probabilities, strict=True):
            sums[name] += math.log(max(probability, LEAST))
        self._rows.setdefault(item, []).append((row.image, row.classes[0], row.known))
        return replace(row, classes=(), probabilities=(), group=item)

    def answers(self) -> dict[str, Prediction]:
        """Return the answer of each item; it is unknown if most of its photographs are."""
        return {item: self._answer(item) for item in self._rows}

    def _answer(self, item: str) -> Prediction:
        rows = self._rows[item]
        means = {name: total / len(rows) for name, total in self._logs[item].items()}
        highest = max(means.values())
        total = sum(math.exp(mean - highest) for mean in means.values())
        best = sorted(means, key=lambda name: -means[name])[: self._top_k]
        shares = tuple(math.exp(means[name] - highest) / total for name in best)
        known = 2 * sum(known for *_, known in rows) >= len(rows)
        return Prediction(item, tuple(best), shares, known, group=item)

    def answered(self, rows: Sequence[Prediction]) -> list[Prediction]:
        """Return the photographs' predictions with the answers of their items."""
        answers = self.answers()
        return [
            row
            if row.group is None
            else replace(
                row,
                classes=answers[row.group].classes,
                probabilities=answers[row.group].probabilities,
                known=answers[row.group].known,
            )
            for row in rows
        ]

    def write(self, file: str) -> None:
        """Write a row for each item, without a class if it is unknown.

        `agreeing` counts the photographs whose own answer is that of the item.
        """
        files.write_csv(file, HEADER, [self._line(item, answer) for item, answer in self.answers().items()])

    def _line(self, item: str, answer: Prediction) -> list[object]:
        rows, name = self._rows[item], answer.classes[0] if answer.known else ""
        agreeing = sum((best if known else "") == name for _, best, known in rows)
        times = [time for image, *_ in rows if (time := self._taken[image]) is not None]
        ends = [clock(end(times)) for end in (min, max)] if times else ["", ""]
        sites = {self._sites[image] for image, *_ in rows}
        site = sites.pop() if len(sites) == 1 else ""
        probability = f"{answer.probabilities[0]:.6f}"
        return [printable(item), printable(name), probability, len(rows), agreeing, *ends, printable(site)]
