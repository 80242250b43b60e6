"""Measure accuracy by the number of labels, for images selected by `suggest`, at random, or by simpler rules.

Each selection method starts without labels. In each round it selects as many images as there are classes, and they are
labelled. A class is known after one of its images was labelled, but the test images of all classes count. After each
round, a new classifier learns all labelled images. With `--untidy groups:4`, `suggest` and the classifier know which
images show the same thing, and with `bursts:4` they do not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.photos.suggesting import suggestions
from research.benchmarks import common, frozen
from research.benchmarks.untidy import untidy

Way = Callable[..., list[int]]


def main(argv: Sequence[str] | None = None) -> None:
    options = common.stream_parser(__doc__, repeats=3)
    options.add_argument("--only", default="", help="use only classes whose names begin with this text")
    options.add_argument("--most", type=int, default=8, help="labels per class, at most")
    options.add_argument("--classifier", default="bayes")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    frozen.untidy_option(options)
    frozen.real_options(options)
    values = common.parse(options, argv)
    values.counts, rows = ["1"], []
    most = 1 if values.quick else values.most
    for (stream, _, drawn), kind in product(frozen.lines(values), values.untidy):
        draws = [after(kind, part(drawn(seed), values.only), seed) for seed in range(values.repeats)]
        for name, way in WAYS.items():
            curves = [curve(made, way, values.classifier, most, seed) for seed, made in enumerate(draws)]
            rows += figures(stream if kind == "none" else f"{stream}, {kind}", name, curves)
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


def after(kind: str, features: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the features after what `kind` of `research.benchmarks.untidy` says happened to the training images.

    Of bursts there are half as many as images; the others are those from which frames are made.
    """
    rows = torch.randperm(len(features["train"]), generator=torch.Generator().manual_seed(seed))
    if kind.startswith(("bursts", "groups")):
        rows = rows[::2]
    rows, nothing = rows.sort().values, features["train"][:0]
    every, labels = list(range(len(features["names"]))), features["y"][rows].tolist()
    task = frozen.Task(every, features["train"][rows], labels, nothing, [], nothing, [])
    features, (task,) = untidy(kind, features, [task], seed)
    return features | {"train": task.train, "y": torch.tensor(task.y), "groups": task.groups}


def curve(features: dict[str, Any], way: Way, spec: str, most: int, seed: int) -> list[float]:
    """Return the test accuracy with 1, 2, ... labels per class."""
    generator = torch.Generator().manual_seed(seed)
    # In random order, so that no method can profit from the order of the files.
    left = torch.randperm(len(features["train"]), generator=generator)
    labelled, classifier, accuracies, texts = left[:0], None, [], features["text"]
    groups = torch.tensor(features["groups"]) if features["groups"] else None
    for _ in range(most):
        if len(left) < len(features["names"]):
            break
        known = {} if groups is None else {"groups": groups[left], "labelled": set(groups[labelled].tolist())}
        chosen = way(features["train"][left], len(features["names"]), classifier, seed, **known)
        labelled = torch.cat([labelled, left[chosen]])
        kept = torch.ones(len(left), dtype=torch.bool)
        kept[chosen] = False
        left = left[kept]
        labels, rows = features["y"][labelled].unique(return_inverse=True)
        classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
        names = [features["names"][label] for label in labels.tolist()]
        own, together = None if texts is None else texts[labels], None if groups is None else groups[labelled]
        classifier.add_classes(names, features["train"][labelled], rows, own, groups=together)
        answers = labels[classifier(features["test"]).argmax(dim=1)]
        accuracies.append((answers == features["truth"]).double().mean().item())
    return accuracies


def by_chance(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int, **known: Any) -> list[int]:
    return list(range(min(count, len(features))))


def least_sure(
    features: torch.Tensor, count: int, classifier: Classifier | None, seed: int, **known: Any
) -> list[int]:
    """Select the images with the largest entropy."""
    if classifier is None:
        return by_chance(features, count, classifier, seed)
    shares = classifier.probabilities(features).double().clamp_min(1e-30)
    return (shares * shares.log()).sum(dim=1).argsort()[:count].tolist()


def clusters(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int, **known: Any) -> list[int]:
    return [suggestion.row for suggestion in suggestions(features, count, seed=seed, **known)]


def suggested(features: torch.Tensor, count: int, classifier: Classifier | None, seed: int, **known: Any) -> list[int]:
    return [suggestion.row for suggestion in suggestions(features, count, classifier, seed, **known)]


WAYS: dict[str, Way] = {
    "at random": by_chance,
    "least sure alone": least_sure,
    "clusters alone": clusters,
    "suggest": suggested,
}

if __name__ == "__main__":
    main()
