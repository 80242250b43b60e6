"""Measure every classifier on a stream without training, by the number of images per class, balanced or not.

Each image is encoded once. With `--real`, the features come from a folder in the format of `research.benchmarks.real`.
Each seed draws the order of the classes and the images. `--counts` takes

    8          8 images of each class
    2/32       2 and 32 images in turn
    40/rank    a long tail: 40 images of the first class in a random order, 20 of the second, 13 of the third, ...
    lone4      4 images of each class, but only 1 of every fifth class
    4+4        4 images of each class; from the second task on, each task adds 4 images of every third known class

`--constants` measures everything once with each value of a constant of `bayes`; `results/constants` has such choices:

    python -m research.benchmarks.frozen --real real-clip --streams cars --untidy bare:0.1 --counts 2 \\
        --classifiers bayes:features=0 --held-back 8 --names own --constants ADDED=0.1 ADDED=0.15 ADDED=0.2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.classifiers import bayes, text_prior
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import CLASSIFIERS, make_classifier
from dulbe_peft.data.readers import load_data
from dulbe_peft.metrics.accuracy import calibration_error
from research.benchmarks import common, real, rivals
from research.benchmarks.untidy import untidy

SPECS = (*("text", "bridge", "prototype", "lda", "gda", "ridge", "ranpac:features=1000", "bayes"),)
FEW = 8  # a class with fewer images counts as a class with few images
DRAWN = 20  # draws of right and wrong answers from the probabilities, for `ECE_exact`


@dataclass
class Task:
    """A task: new `classes` with features, (n, d), and labels, and `further` images of known classes."""

    classes: list[int]
    train: torch.Tensor
    y: list[int]
    further: torch.Tensor
    further_y: list[int]
    test: torch.Tensor
    truth: list[int]
    counts: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    options = stream_options(__doc__, ["1", "2", "4", "8", "16", "100"], SPECS)
    options.add_argument("--first-seed", type=int, default=0)
    options.add_argument(
        "--held-back",
        type=int,
        default=0,
        help="held-out training images per class to test on, to choose settings",
    )
    options.add_argument("--shuffled-texts", action="store_true", help="shuffle the text embeddings of the classes")
    options.add_argument(
        "--coverage", type=float, help="also measure the coverage of prediction sets with this guarantee"
    )
    options.add_argument("--constants", nargs="+", default=[""], metavar="NAME=VALUE", help="of bayes or text_prior")
    values = common.parse(options, argv)

    def measure(spec: str, features: dict[str, Any], tasks: list[Task]) -> Mapping[str, float | None]:
        evaluate = rivals.figures if spec in rivals.RIVALS else partial(figures, coverage=values.coverage)
        return evaluate(spec, features, tasks)

    what, rows = "{stream}, {counts} images a class, {classifier}: {figure}", list[dict[str, Any]]()
    for setting in values.constants:
        with constant(setting):
            found = measured(values, measure, what, values.first_seed, values.held_back)
        rows += [row | {"what": f"{setting}, {row['what']}", "constant": setting} if setting else row for row in found]
    common.write("frozen", values, argv, rows)


@contextmanager
def constant(setting: str) -> Iterator[None]:
    """Give a constant of `bayes` or `text_prior` another value in the block; "" changes nothing.

    Raises:
        ValueError: If there is no such constant.
    """
    name, _, value = setting.partition("=")
    module = next(
        (each for each in (text_prior, bayes) if name.isupper() and isinstance(vars(each).get(name), float)), None
    )
    if setting and module is None:
        raise ValueError(f"--constants must name a number of bayes or text_prior, such as ADDED=0.1, got {setting!r}")
    before = None if module is None else vars(module)[name]
    try:
        if module is not None:
            setattr(module, name, float(value))
        yield
    finally:
        if module is not None:
            setattr(module, name, before)


def stream_options(
    description: str | None, counts: Sequence[str], classifiers: Sequence[str]
) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark of several classifiers and numbers of images."""
    options = common.stream_parser(description, repeats=3)
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--counts", nargs="+", default=list(counts))
    untidy_option(options)
    options.add_argument("--classifiers", nargs="+", default=list(classifiers))
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    return real_options(options)


def untidy_option(options: argparse.ArgumentParser) -> None:
    options.add_argument("--untidy", nargs="+", default=["none"], help="see research.benchmarks.untidy")


def real_options(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of a benchmark that can also learn the streams of `research.benchmarks.real`."""
    folder_options(options)
    options.add_argument("--names", nargs="+", default=list(real.NAMES), help="with --real: the strength of the names")
    return options


def folder_options(options: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that select streams of `research.benchmarks.real`."""
    options.add_argument(
        "--real", type=Path, help="feature folder for research.benchmarks.real, instead of a model and data"
    )
    options.add_argument("--streams", nargs="+", default=list(real.STREAMS), help="with --real: the streams")
    return options


def measured(
    values: Any,
    measure: Callable[[str, dict[str, Any], list[Task]], Mapping[str, float | None]],
    what: str,
    first_seed: int = 0,
    held_back: int = 0,
) -> list[dict[str, Any]]:
    """Return a row for each number of images, classifier and figure: the mean and all draws, in percent.

    A figure that one of the draws does not have is None.
    """
    rows = []
    for (stream, counts, drawn), kind in product(lines(values), values.untidy):
        seeds = range(first_seed, first_seed + values.repeats)
        clean = [(made := drawn(seed), draw(made, counts, step(made, values), seed, held_back)) for seed in seeds]
        if kind.startswith("names") and clean[0][0]["text"] is None:
            continue
        draws = [untidy(kind, made, tasks, seed) for seed, (made, tasks) in zip(seeds, clean, strict=True)]
        for spec in values.classifiers:
            if draws[0][0]["text"] is None and needs_text(spec):
                continue
            results = [measure(spec, made, tasks[:2] if values.quick else tasks) for made, tasks in draws]
            line = stream if kind == "none" else f"{stream}, {kind}"
            key = {"stream": line, "counts": counts, "classifier": spec}
            for figure in results[0]:
                found = [result[figure] for result in results]
                each = [None if value is None else common.rounded(100 * value) for value in found]
                mean = None if None in each else common.rounded(statistics.fmean(each))
                value = common.value_row(what.format(**key, figure=figure), mean, "%")
                rows.append(value | key | {"figure": figure, "each": each})
    return rows


def lines(values: Any) -> Iterator[tuple[str, str, Callable[[int], dict[str, Any]]]]:
    """Yield each stream and number of images to measure, and a function that returns the features for a seed."""
    if values.real is None:
        features, stream = encoded(values), values.stream or common.model_name(values.data)
        for counts in values.counts[:1] if values.quick else values.counts:
            yield stream, counts, lambda seed: features
        return
    for stream, names, counts in real.lines(values.real, values.streams, values.names, values.counts):
        yield f"{stream}, {real.SAID[names]}", counts, partial(real.stream, values.real, stream, names)


def step(features: dict[str, Any], values: Any) -> int:
    """Return the number of classes per task."""
    return int(values.increment if values.real is None else real.increment(features))


def needs_text(spec: str) -> bool:
    name = spec.partition(":")[0]
    return name in rivals.WITH_TEXT or (name in CLASSIFIERS and CLASSIFIERS[name].needs_text)


def encoded(values: Any) -> dict[str, Any]:
    """Return unit features and labels of the training and test images, text embeddings, class names, and tau."""
    train, test = (common.some(load_data(values.data, split), values) for split in ("train", "test"))
    model, processor = load_dual_encoder(values.clip)
    args = LearnerArguments(prompt_template=values.prompt_template, progress=False, device="cpu")
    learner = ClassIncrementalLearner(model, processor, args=args, strategy="frozen", classifiers="prototype")
    texts = learner.encoder.text_embeds(train.class_names)
    if getattr(values, "shuffled_texts", False):
        texts = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]
    return {
        "train": learner.image_embeds(train),
        "y": torch.as_tensor(train.labels),
        "test": learner.image_embeds(test),
        "truth": torch.as_tensor(test.labels),
        "text": texts,
        "names": train.class_names,
        "scale": learner.logit_scale,
    }


def images_of(counts: str, classes: int, generator: torch.Generator) -> tuple[list[int], int]:
    """Parse `counts`: the images of each class in its first task, and the further images in each later task."""
    first, _, further = counts.partition("+")
    if first.endswith("/rank"):
        most = int(first.removesuffix("/rank"))
        ranks = torch.randperm(classes, generator=generator).tolist()
        return [max(1, round(most / (1 + rank))) for rank in ranks], int(further or 0)
    if first.startswith("lone"):
        return [1 if place % 5 == 0 else int(first.removeprefix("lone")) for place in range(classes)], 0
    turns = [int(part) for part in first.split("/")]
    return [turns[place % len(turns)] for place in range(classes)], int(further or 0)


def draw(features: dict[str, Any], counts: str, increment: int, seed: int, held_back: int = 0) -> list[Task]:
    """Draw the tasks of a stream: the order of the classes, and the images of each class.

    Raises:
        ValueError: If `held_back` leaves too few training images.
    """
    check_held_back(features, counts, held_back)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(features["names"]), generator=generator)
    wanted, monthly = images_of(counts, len(order), generator)
    pools, tests = [], []
    for label in order.tolist():
        rows = (features["y"] == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        pools.append(features["train"][rows[: len(rows) - held_back]])
        held_out = features["train"][rows[len(rows) - held_back :]] if held_back else None
        tests.append(features["test"][features["truth"] == label] if held_out is None else held_out)
    used = [min(count, len(pool)) for count, pool in zip(wanted, pools, strict=True)]
    tasks = []
    for start in range(0, len(order), increment):
        places = range(start, min(start + increment, len(order)))
        known = range(0, start, 3) if monthly else range(0)
        more = [pools[place][used[place] : used[place] + monthly] for place in known]
        for place, images in zip(known, more, strict=True):
            used[place] += len(images)
        tasks.append(
            Task(
                classes=order[start : start + increment].tolist(),
                train=torch.cat([pools[place][: used[place]] for place in places]),
                y=[place - start for place in places for _ in range(used[place])],
                further=torch.cat([*more, features["train"][:0]]),
                further_y=[place for place, images in zip(known, more, strict=True) for _ in images],
                test=torch.cat([tests[place] for place in places]),
                truth=[place for place in places for _ in tests[place]],
            )
        )
    tasks[-1].counts = used
    return tasks


def check_held_back(features: dict[str, Any], counts: str, held_back: int) -> None:
    """Raise a `ValueError` if a class has no training image left, or the median class fewer than `counts` says."""
    if held_back < 0:
        raise ValueError(f"--held-back must be at least 0, got {held_back}")
    sizes = features["y"].bincount(minlength=len(features["names"]))
    fewest, usual = int(sizes.min()), int(sizes.median())
    if held_back and held_back >= fewest:
        raise ValueError(
            f"--held-back is {held_back}, but the class {features['names'][int(sizes.argmin())]!r} has {fewest} "
            f"training images, of which one must be learned: use at most {max(fewest - 1, 0)}"
        )
    if held_back and not real.enough(features, counts, held_back):
        raise ValueError(
            f"--held-back {held_back} leaves {usual - held_back} of the {usual} training images of the median class, "
            f"too few for --counts {counts}: use a smaller number of either"
        )


def learned(spec: str, features: dict[str, Any], tasks: Sequence[Task]) -> Classifier:
    """Return a classifier that has learned the tasks in order, without further images of known classes."""
    classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
    seen: list[int] = []
    for task in tasks:
        seen += task.classes
        names = [features["names"][label] for label in task.classes]
        texts = None if features["text"] is None else features["text"][seen]
        classifier.add_classes(names, task.train, task.y, texts, groups=task.groups or None)
    return classifier


@torch.no_grad()
def figures(
    spec: str, features: dict[str, Any], tasks: list[Task], coverage: float | None = None
) -> dict[str, float | None]:
    """Return A_last, also of classes with few or many images or without a right name, A_bar and ECE, as fractions.

    `ECE_exact` is the calibration error that these probabilities would have if they were exact. With few test images,
    it is large. `covered` is None if the classifier refuses prediction sets.
    """
    classifier = make_classifier(spec, features["train"].shape[1], features["scale"])
    seen: list[int] = []
    overall, texts = [], features["text"]
    for number, task in enumerate(tasks, start=1):
        seen += task.classes
        names = [features["names"][label] for label in task.classes]
        known = texts[seen] if texts is not None else None
        classifier.add_classes(names, task.train, task.y, known, groups=task.groups or None)
        if task.further_y and spec.partition(":")[0] != "text":
            classifier.update_classes(task.further, task.further_y)
        truth = torch.tensor([place for past in tasks[:number] for place in past.truth])
        tests = torch.cat([past.test for past in tasks[:number]])
        confidence, predicted = classifier.probabilities(tests).max(dim=1)
        correct = predicted == truth
        overall.append(correct.double().mean().item())
    result: dict[str, float | None] = {"A_last": overall[-1], "A_bar": statistics.fmean(overall)}
    result["ECE"] = calibration_error(confidence, correct)
    drawn = torch.rand(DRAWN, len(confidence), generator=torch.Generator().manual_seed(0)) < confidence
    result["ECE_exact"] = statistics.fmean(calibration_error(confidence, each) for each in drawn)
    if coverage and len(classifier.calibration):  # no guarantee is possible with one image per class
        try:
            sets = classifier.prediction_sets(tests, coverage)
            result["covered"] = sets.gather(1, truth[:, None]).double().mean().item()
        except ValueError:
            result["covered"] = None
    counts = tasks[-1].counts or [FEW] * len(seen)  # only the last task has counts, and a quick run may leave it out
    few = torch.tensor(counts)[truth] < FEW
    if few.any() and not few.all():
        result |= {"few": correct[few].double().mean().item(), "many": correct[~few].double().mean().item()}
    wrong = torch.isin(torch.tensor(seen)[truth], torch.tensor(features.get("bare", features.get("misnamed", []))))
    if wrong.any() and not wrong.all():
        result |= {"bare": correct[wrong].double().mean().item(), "named": correct[~wrong].double().mean().item()}
    return result


if __name__ == "__main__":
    main()
