"""Compare the accuracy that `estimate()` reports, from left-out images, with the accuracy on test images.

Nothing is trained, so each image is encoded once. The options are those of `research.benchmarks.frozen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dulbe_peft.training.estimating import MOST_LEFT_OUT, left_out_share
from research.benchmarks import common
from research.benchmarks.frozen import Task, learned, measured, stream_options


def main(argv: Sequence[str] | None = None) -> None:
    classifiers = ("text", "bridge", "lda", "ranpac:features=1000", "bayes")
    values = common.parse(stream_options(__doc__, ["4", "16"], classifiers), argv)
    what = "{classifier}, {counts} images a class, {stream}: {figure}"
    common.write("estimates", values, argv, measured(values, figures, what))


@torch.no_grad()
def figures(spec: str, features: dict[str, Any], tasks: Sequence[Task]) -> dict[str, float]:
    """Return the estimate, its interval, and A_last, as fractions."""
    classifier = learned(spec, features, tasks)
    seen = classifier.class_names
    starts = [sum(len(past.classes) for past in tasks[:number]) for number in range(len(tasks))]
    labels = torch.tensor([start + label for start, task in zip(starts, tasks, strict=True) for label in task.y])
    images, share = torch.cat([task.train for task in tasks]), max(1, MOST_LEFT_OUT // len(seen))
    rows = [rows[:share] for label in labels.unique() if len(rows := (labels == label).nonzero()[:, 0]) > 1]
    estimate = left_out_share(classifier, images[torch.cat(rows)], labels[torch.cat(rows)]) or ()
    truth = torch.tensor([label for task in tasks for label in task.truth])
    predicted = classifier(torch.cat([task.test for task in tasks])).argmax(dim=1)
    accuracy = float((predicted == truth).double().mean())
    return dict(zip(("estimate", "low", "high"), estimate, strict=False)) | {"test": accuracy}


if __name__ == "__main__":
    main()
