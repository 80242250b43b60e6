"""Compare the accuracy that `estimate()` reports, from left-out images, with the accuracy on test images.

Nothing is trained, so each image is encoded once. The options are those of `research.benchmarks.frozen`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dulbe_peft.classifiers.groups import together
from dulbe_peft.classifiers.leaving import MOST, in_turn
from dulbe_peft.training.estimating import corrected, left_out_share, surely_wrong
from research.benchmarks import common
from research.benchmarks.frozen import Task, learned, measured, stream_options


def main(argv: Sequence[str] | None = None) -> None:
    classifiers = ("text", "bridge", "lda", "ranpac:features=1000", "bayes")
    values = common.parse(stream_options(__doc__, ["4", "16"], classifiers), argv)
    what = "{classifier}, {counts} images a class, {stream}: {figure}"
    common.write("estimates", values, argv, measured(values, figures, what))


@torch.no_grad()
def figures(spec: str, features: dict[str, Any], tasks: Sequence[Task]) -> dict[str, float]:
    """Return the estimate, its interval, A_last, and the accuracy on the classes of the estimate, as fractions."""
    classifier = learned(spec, features, tasks)
    seen = classifier.class_names
    starts = [sum(len(past.classes) for past in tasks[:number]) for number in range(len(tasks))]
    labels = torch.tensor([start + label for start, task in zip(starts, tasks, strict=True) for label in task.y])
    images = torch.cat([task.train for task in tasks])
    chosen = torch.zeros(len(labels), dtype=torch.bool).index_fill(0, in_turn(labels, MOST), True)
    groups = joined(tasks)
    if groups is not None:
        chosen = torch.isin(groups, groups[chosen])  # whole groups
    counts = labels.bincount(minlength=len(seen))
    chosen &= counts[labels] > together(labels, groups)
    truth = torch.tensor([label for task in tasks for label in task.truth])
    right = classifier(torch.cat([task.test for task in tasks])).argmax(dim=1) == truth
    found = {"test": float(right.double().mean())}
    if not chosen.any():
        return found
    of = labels[chosen]
    estimate = left_out_share(classifier, images[chosen], of, None if groups is None else groups[chosen])
    if estimate is not None and (wrong := surely_wrong([classifier])) is not None:
        estimate = corrected(estimate, wrong, len(seen))
    found["test, classes of the estimate"] = float(right[torch.isin(truth, of)].double().mean())
    return dict(zip(("estimate", "low", "high"), estimate or (), strict=False)) | found


def joined(tasks: Sequence[Task]) -> torch.Tensor | None:
    """Return the group of each image of all tasks, (n,), or None without groups. Groups of two tasks differ."""
    if not tasks[0].groups:
        return None
    starts = [sum(max(past.groups) + 1 for past in tasks[:number]) for number in range(len(tasks))]
    return torch.tensor([start + own for start, task in zip(starts, tasks, strict=True) for own in task.groups])


if __name__ == "__main__":
    main()
