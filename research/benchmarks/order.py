"""How many answers change with the order of the tasks, with one task in place of all, and with two halves merged.

With fixed settings a classifier of sums gives the same answers. What it chooses on each task's images may differ.
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
    """The share of the answers that each other way to the same images changes."""
    tests, half = torch.cat([task.test for task in tasks]), len(tasks) // 2
    usual = answers(learned(spec, features, tasks), tests)
    apart = [learned(spec, features, part) for part in (tasks[:half], tasks[half:])]
    others = {
        "another order": learned(spec, features, tasks[::-1]),
        "one task": learned(spec, features, [whole(tasks)]),
        "merging two halves": apart[0].merge(apart[1]),
    }
    pairs = {name: zip(answers(other, tests), usual, strict=True) for name, other in others.items()}
    return {name: statistics.fmean(one != two for one, two in both) for name, both in pairs.items()}


def whole(tasks: Sequence[Task]) -> Task:
    """One task of all."""
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
    """The class of each image."""
    return [classifier.class_names[place] for place in classifier(tests).argmax(dim=1).tolist()]


if __name__ == "__main__":
    main()
