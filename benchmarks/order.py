"""How many answers change with the order of the tasks, with one task in place of all, and with two halves merged.

With fixed settings a classifier of sums gives the same answers. What it chooses on each task's images may differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import common
from benchmarks.frozen import Task, draw, encoded
from dulbe_peft.classifiers import Classifier, make_classifier


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--counts", nargs="+", default=["1", "4", "16", "2/32"], help="as of benchmarks.frozen")
    options.add_argument("--classifiers", nargs="+", default=["bayes", "bayes:kappa=4,rho=3"])
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    values = common.parse(options, argv)
    features, rows = encoded(values), []
    for counts in values.counts[:1] if values.quick else values.counts:
        draws = [draw(features, counts, values.increment, seed) for seed in range(values.repeats)]
        for spec in values.classifiers:
            found = [changed(spec, features, tasks) for tasks in draws]
            stream = values.stream or common.model_name(values.data)
            key = {"stream": stream, "counts": counts, "classifier": spec}
            for figure in found[0]:
                each = [common.rounded(100 * one[figure]) for one in found]
                what = f"{spec}, {counts} images a class, {stream}: answers that {figure} changes"
                value = common.value_row(what, common.rounded(statistics.fmean(each)), "%")
                rows.append(value | key | {"figure": figure, "each": each})
    common.write("order", values, argv, rows)


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


def learned(spec: str, features: dict[str, Any], tasks: Sequence[Task]) -> Classifier:
    """A classifier that has learned the tasks one after the other."""
    classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
    seen: list[int] = []
    for task in tasks:
        seen += task.classes
        names = [features["names"][label] for label in task.classes]
        classifier.add_classes(names, task.train, task.y, features["text"][seen])
    return classifier


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
