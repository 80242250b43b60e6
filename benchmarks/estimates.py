"""`estimate()` beside the test: what is named right of images that are left out, and of test images.

Nothing is trained, so every image is encoded once. The options are those of `benchmarks.frozen`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.frozen import Task, draw, encoded
from dulbe_peft.classifiers import make_classifier
from dulbe_peft.training.estimating import MOST_LEFT_OUT, left_out_share


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--counts", nargs="+", default=["4", "16"])
    options.add_argument(
        "--classifiers", nargs="+", default=["text", "bridge", "lda", "ranpac:features=1000", "bayes"]
    )
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    values = common.parse(options, argv)
    features, rows = encoded(values), []
    for counts in values.counts[:1] if values.quick else values.counts:
        draws = [draw(features, counts, values.increment, seed) for seed in range(values.repeats)]
        for spec in values.classifiers:
            found = [figures(spec, features, tasks) for tasks in draws]
            for figure in found[0]:
                each = [common.rounded(100 * one[figure]) for one in found]
                stream = values.stream or common.model_name(values.data)
                what = f"{spec}, {counts} images a class, {stream}: {figure}"
                rows.append(common.value_row(what, common.rounded(statistics.fmean(each)), "%") | {"each": each})
    common.write("estimates", values, argv, rows)


@torch.no_grad()
def figures(spec: str, features: dict[str, Any], tasks: Sequence[Task]) -> dict[str, float]:
    """The estimate, its interval, and A_last, as fractions."""
    classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
    seen: list[int] = []
    for task in tasks:
        seen += task.classes
        names = [features["names"][label] for label in task.classes]
        classifier.add_classes(names, task.train, task.y, features["text"][seen])
    starts = [sum(len(past.classes) for past in tasks[:number]) for number in range(len(tasks))]
    labels = torch.tensor([start + label for start, task in zip(starts, tasks, strict=True) for label in task.y])
    images, share = torch.cat([task.train for task in tasks]), max(1, MOST_LEFT_OUT // len(seen))
    rows = [rows[:share] for label in labels.unique() if len(rows := (labels == label).nonzero()[:, 0]) > 1]
    estimate = left_out_share(classifier, images[torch.cat(rows)], labels[torch.cat(rows)]) or ()
    truth = torch.tensor([label for task in tasks for label in task.truth])
    said = classifier(torch.cat([task.test for task in tasks])).argmax(dim=1)
    right = float((said == truth).double().mean())
    return dict(zip(("estimate", "low", "high"), estimate, strict=False)) | {"test": right}


if __name__ == "__main__":
    main()
