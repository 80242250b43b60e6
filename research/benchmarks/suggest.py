"""Measure accuracy by the number of labels, for images selected by `suggest`, at random, or by simpler rules.

Each selection method starts without labels. In each round it selects as many images as there are classes, and they are
labelled. A class is known after one of its images was labelled, but the test images of all classes count. After each
round, a new classifier learns all labelled images.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.photos.suggesting import suggestions
from research.benchmarks import common, frozen

Way = Callable[[torch.Tensor, int, Classifier | None, int], list[int]]


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--only", default="", help="use only classes whose names begin with this text")
    options.add_argument("--most", type=int, default=8, help="labels per class, at most")
    options.add_argument("--classifier", default="bayes")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    frozen.real_options(options)
    values = common.parse(options, argv)
    values.counts, rows = ["1"], []
    most = 1 if values.quick else values.most
    for stream, _, drawn in frozen.lines(values):
        draws = [part(drawn(seed), values.only) for seed in range(values.repeats)]
        for name, way in WAYS.items():
            curves = [curve(made, way, values.classifier, most, seed) for seed, made in enumerate(draws)]
            rows += figures(stream, name, curves)
    common.write("suggest", values, argv, rows)


def figures(stream: str, name: str, curves: list[list[float]]) -> list[dict[str, Any]]:
    """Return a row for each number of labels for which every draw has enough images."""
    rows = []
    for number, each in enumerate(zip(*curves, strict=False), start=1):
        each = [common.rounded(100 * value) for value in each]
        what = f"{stream}, {number} labels a class, {name}"
        row = common.value_row(what, common.rounded(statistics.fmean(each)), "%")
        rows.append(row | {"stream": stream, "labels": number, "way": name, "each": each})
    return rows


def part(features: dict[str, Any], begins: str) -> dict[str, Any]:
    """Return the features of the classes whose names begin with `begins`."""
    kept = [label for label, name in enumerate(features["names"]) if name.startswith(begins)]
    place = {label: number for number, label in enumerate(kept)}
    selected = {
        **features,
        "names": [features["names"][label] for label in kept],
        "text": None if features["text"] is None else features["text"][kept],
    }
    for images, labels in (("train", "y"), ("test", "truth")):
        rows = [row for row, label in enumerate(features[labels].tolist()) if label in place]
        selected[images] = features[images][rows]
        selected[labels] = torch.tensor([place[label] for label in features[labels][rows].tolist()])
    return selected


def curve(features: dict[str, Any], way: Way, spec: str, most: int, seed: int) -> list[float]:
    """Return the test accuracy with 1, 2, ... labels per class."""
    generator = torch.Generator().manual_seed(seed)
    # In random order, so that no method can profit from the order of the files.
    left = torch.randperm(len(features["train"]), generator=generator)
    labelled, classifier, accuracies, texts = left[:0], None, [], features["text"]
    for _ in range(most):
        if len(left) < len(features["names"]):
            break
        chosen = way(features["train"][left], len(features["names"]), classifier, seed)
        labelled = torch.cat([labelled, left[chosen]])
        kept = torch.ones(len(left), dtype=torch.bool)
        kept[chosen] = False
        left = left[kept]
        labels, rows = features["y"][labelled].unique(return_inverse=True)
        classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
        names = [features["names"][label] for label in labels.tolist()]
        classifier.add_classes(names, features["train"][labelled], rows, None if texts is None else texts[labels])
        answers = labels[classifier(features["test"]).argmax(dim=1)]
        accuracies.append((answers == features["truth"]).double().mean().item())
    return accuracies


def by_chance(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int) -> list[int]:
    return list(range(min(count, len(features))))


def least_sure(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int) -> list[int]:
    """Select the images with the largest entropy."""
    if classifier is None:
        return by_chance(features, count, classifier, seed)
    shares = classifier.probabilities(features).double().clamp_min(1e-30)
    return (shares * shares.log()).sum(dim=1).argsort()[:count].tolist()


def clusters(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int) -> list[int]:
    return [suggestion.row for suggestion in suggestions(features, count, seed=seed)]


def suggested(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int) -> list[int]:
    return [suggestion.row for suggestion in suggestions(features, count, classifier, seed)]


WAYS: dict[str, Way] = {
    "at random": by_chance,
    "least sure alone": least_sure,
    "clusters alone": clusters,
    "suggest": suggested,
}

if __name__ == "__main__":
    main()
