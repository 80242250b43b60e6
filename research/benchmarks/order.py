"""Measure how many answers change if tasks come in another order, if they are one task, or if two halves are merged.

With fixed settings, a classifier that keeps sums gives the same answers. Settings that it chooses from the images of
each task may differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from research.benchmarks import common
from research.benchmarks.frozen import Task, learned, measured, stream_options


def main(argv: Sequence[str] | None = None) -> None:
    values = common.parse(stream_options(__doc__, ["1", "4", "16", "2/32"], ["bayes", "bayes:kappa=4,rho=3"]), argv)
    what = "{classifier}, {counts} images a class, {stream}: answers that {figure} changes"
    common.write("order", values, argv, measured(values, changed, what))


@torch.no_grad()
def changed(spec: str, features: dict[str, Any], tasks: Sequence[Task]) -> dict[str, float]:
    """Return the share of answers that change for each other way to learn the same images."""
    tests, half = torch.cat([task.test for task in tasks]), len(tasks) // 2
    expected = answers(learned(spec, features, tasks), tests)
    halves = [learned(spec, features, part) for part in (tasks[:half], tasks[half:])]
    others = {
        "another order": learned(spec, features, tasks[::-1]),
        "one task": learned(spec, features, [whole(tasks)]),
        "merging two halves": halves[0].merge(halves[1]),
    }
    pairs = {name: zip(answers(other, tests), expected, strict=True) for name, other in others.items()}
    return {name: statistics.fmean(answer != other for answer, other in both) for name, both in pairs.items()}


def whole(tasks: Sequence[Task]) -> Task:
    """Return one task with the classes and training images of all tasks."""
    starts = [sum(len(past.classes) for past in tasks[:number]) for number in range(len(tasks))]
    return Task(
        classes=[label for task in tasks for label in task.classes],
        train=torch.cat([task.train for task in tasks]),
        y=[start + label for start, task in zip(starts, tasks, strict=True) for label in task.y],
        further=tasks[0].train[:0],
        further_y=[],
        test=tasks[0].test[:0],
        truth=[],
    )


def answers(classifier: Classifier, tests: torch.Tensor) -> list[str]:
    """Return the predicted class name of each image."""
    return [classifier.class_names[place] for place in classifier(tests).argmax(dim=1).tolist()]


if __name__ == "__main__":
    main()
