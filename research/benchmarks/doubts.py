"""Compare how many labels `dulbe-peft check` says are wrong with how many are.

All classes are learned at once. The options are those of `research.benchmarks.frozen`; `--untidy` makes wrong labels,
such as `similar:0.1` for a tenth of the labels that go to the most similar class. Nothing is trained.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from dulbe_peft.photos.doubtful_labels import doubtful_labels
from research.benchmarks import common, frozen
from research.benchmarks.untidy import untidy

FIRST = 10  # doubtful labels that `check` shows first
# The other figures are in percent.
COUNTED = ("wrong of the first", "said of the first", "low of the first", "high of the first")


def main(argv: Sequence[str] | None = None) -> None:
    options = frozen.real_options(common.stream_parser(__doc__, repeats=2))
    options.add_argument("--counts", nargs="+", default=["8", "20"], help="as for research.benchmarks.frozen")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    frozen.untidy_option(options)
    values, rows = common.parse(options, argv), list[dict[str, Any]]()
    for (stream, counts, drawn), kind in product(frozen.lines(values), values.untidy):
        draws = [figures(drawn(seed), counts, kind, seed) for seed in range(values.repeats)]
        line = stream if kind == "none" else f"{stream}, {kind}"
        for figure in draws[0]:
            each = [common.rounded(draw[figure]) for draw in draws]
            what = f"bayes, {counts} images a class, {line}: {figure}"
            unit = "labels" if figure in COUNTED else "%"
            rows.append(common.value_row(what, common.rounded(statistics.fmean(each)), unit) | {"each": each})
    common.write("doubts", values, argv, rows)


def figures(features: dict[str, Any], counts: str, kind: str, seed: int) -> dict[str, float]:
    """Return the share of wrong labels, the share that is said with its interval, and both for the first doubts."""
    tasks = frozen.draw(features, counts, len(features["names"]), seed)
    right = {row.tobytes(): y for row, y in zip(tasks[0].train.numpy(), tasks[0].y, strict=True)}
    features, (task,) = untidy(kind, features, tasks, seed)
    wrong = [right[row.tobytes()] != y for row, y in zip(task.train.numpy(), task.y, strict=True)]
    texts = None if features["text"] is None else features["text"][task.classes].numpy()
    doubts, share = doubtful_labels(task.train.numpy(), np.array(task.y), texts, features["scale"])
    said = {} if share is None else dict(zip(("said", "low", "high"), (100 * part for part in share), strict=True))
    first = doubts[:FIRST]
    expected = (sum(doubt.wrong[end] for doubt in first) for end in range(3))
    counted = dict(zip(COUNTED, (sum(wrong[doubt.image] for doubt in first), *expected), strict=True))
    return {"wrong": 100 * float(np.mean(wrong))} | said | counted


if __name__ == "__main__":
    main()
