"""The predictions of every classifier for each image of a data set, and the figures computed from them."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import answering
from dulbe_peft.data.images import LabelledImages, named_images
from dulbe_peft.utils.files import read_csv, write_csv

PREDICTIONS_FILE = "predictions.csv"
# Baselines that the results contain next to the classifiers, if a classifier keeps the embeddings they need.
BASELINES = ("text", "class_means")
MOST_SCORES = 2**22  # the most scores in memory at a time
_COLUMNS = ("image", "class", "predicted", "probability", "task")
_GROUP, _OTHER = "group", "predicted_"


class Figures(TypedDict):
    """What `ClassIncrementalLearner.evaluate` returns: top-1 accuracies in [0, 1], and the number of images."""

    accuracy: float
    classifiers: dict[str, float]
    num_images: float
    text_accuracy: NotRequired[float]
    class_means_accuracy: NotRequired[float]


@dataclass(frozen=True)
class Evaluation:
    """The predictions for the n images of a data set. Labels are int64 indices into `class_names`, on the CPU.

    Attributes:
        class_names: The names of the classes.
        images: The names of the images.
        truth: The true labels, (n,).
        classifiers: The predictions of each classifier, (n,). The first classifier is the one that `predict` uses.
        baselines: "text", the class of the nearest text embedding, and "class_means", the class of the nearest mean,
            each (n,). A baseline is left out if no classifier keeps the embeddings it needs; "class_means" is also
            left out if the learner has the classifier "prototype", which does the same.
        probability: The probability of the first classifier's predictions, (n,).
        features: Unit features, (n, d).
        groups: The number of each image's group, such as an item; empty if the images have no groups.
    """

    class_names: tuple[str, ...]
    images: tuple[str, ...]
    truth: torch.Tensor
    classifiers: dict[str, torch.Tensor]
    baselines: dict[str, torch.Tensor]
    probability: torch.Tensor
    features: torch.Tensor
    groups: tuple[int, ...] = ()

    def figures(self) -> Figures:
        """Return the top-1 accuracies: see `ClassIncrementalLearner.evaluate`."""
        accuracies = {name: self.accuracy(rows) for name, rows in self.classifiers.items()}
        first, number = answering(accuracies), float(len(self.truth))
        figures = Figures(accuracy=accuracies[first], classifiers=accuracies, num_images=number)
        if (text := self.baselines.get("text")) is not None:
            figures["text_accuracy"] = self.accuracy(text)
        if (class_means := self.baselines.get("class_means")) is not None:
            figures["class_means_accuracy"] = self.accuracy(class_means)
        return figures

    def accuracy(self, predicted: torch.Tensor) -> float:
        """Return the accuracy of the predictions, (n,)."""
        return (predicted == self.truth).double().mean().item()


@dataclass(frozen=True)
class EncodedTest:
    """The features, (n, d), of a data set's images, with their labels `truth`, (n,), names and groups."""

    features: torch.Tensor
    truth: torch.Tensor
    images: Sequence[str]
    groups: tuple[int, ...] = ()


@torch.no_grad()
def evaluate_features(
    classifiers: Mapping[str, Classifier], tests: Sequence[EncodedTest], class_names: Sequence[str]
) -> list[Evaluation]:
    """Return the predictions of every classifier and of the two baselines for each test set."""
    parts, embeddings = [test.features for test in tests], dict[str, torch.Tensor]()
    prototypes = {} if "prototype" in classifiers else {"class_means": "visual_prototypes"}
    for name, attribute in {"text": "text_embeds", **prototypes}.items():
        owner = next((c for c in classifiers.values() if hasattr(c, attribute)), None)
        rows = None if owner is None else getattr(owner, attribute)
        if name == "text" and owner is not None and owner.rule.text_dim:  # e'W u has the order of cosines of W u
            rows = rows @ owner.projection
        if rows is not None and parts and rows.any(dim=1).all():  # zeros stand for texts that a model does not have
            embeddings[name] = rows.to(parts[0])
    predictions = {name: answers(classifier, parts) for name, classifier in classifiers.items()}
    return [
        Evaluation(
            class_names=tuple(class_names),
            images=tuple(test.images),
            truth=test.truth.cpu(),
            classifiers={name: pairs[number][0] for name, pairs in predictions.items()},
            baselines={name: nearest(test.features, rows) for name, rows in embeddings.items()},
            probability=predictions[answering(classifiers)][number][1],
            features=test.features.cpu(),
            groups=test.groups,
        )
        for number, test in enumerate(tests)
    ]


def answers(classifier: Classifier, tests: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, for each test set of features, (n, d), the predicted classes and their probabilities.

    Both are (n,), on the CPU. The predictions for one test set do not depend on the other test sets.
    """
    if not tests:
        return []
    temperature, most = classifier.temperature, max(1, MOST_SCORES // len(classifier.class_names))
    parts, results = [part for test in tests for part in test.split(most)], []
    for group in _grouped(parts, most):
        scores = classifier(torch.cat(group), [len(part) for part in group])
        highest = (scores / temperature).softmax(dim=1).amax(dim=1)
        results.append((scores.argmax(dim=1).cpu(), highest.float().cpu()))
    predicted, probability = (torch.cat(rows).split([*map(len, tests)]) for rows in zip(*results, strict=True))
    return list(zip(predicted, probability, strict=True))


def _grouped(parts: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Yield the parts in order, in groups of at most `most` rows together."""
    group, rows = list[torch.Tensor](), 0
    for part in parts:
        if group and rows + len(part) > most:
            yield group
            group, rows = [], 0
        group.append(part)
        rows += len(part)
    yield group


def nearest(features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return, for each feature, (n, d), the index of the most similar row, (C, d); (n,), on the CPU."""
    parts = features.split(max(1, MOST_SCORES // len(rows)))
    return torch.cat([(part @ rows.T).argmax(dim=1).cpu() for part in parts])


@torch.no_grad()
def seen_accuracies(
    text_embeds: Callable[[Sequence[str]], torch.Tensor],
    image_embeds: Callable[[LabelledImages], torch.Tensor],
    tests: Sequence[tuple[object, Sequence[str]]],
) -> list[float | None]:
    """Return A_t for t = 1, 2, ...: the accuracy on the first t test sets of the nearest text among all their classes.

    A test set is a pair of images, or None, and class names. A_t is None if the first t test sets have no images.
    """
    text = text_embeds([name for _, names in tests for name in names])
    encoded, classes, accuracies = [], 0, []
    for dataset, names in tests:
        if dataset is not None and names:
            images = named_images(dataset, names)
            encoded.append((image_embeds(images), torch.as_tensor(images.labels) + classes))
        classes += len(names)
        correct = [(nearest(features, text[:classes]) == labels).tolist() for features, labels in encoded]
        hits = list(itertools.chain(*correct))
        accuracies.append(sum(hits) / len(hits) if hits else None)
    return accuracies


def write_predictions(path: Path, tasks: Mapping[int, Evaluation]) -> None:
    """Write `predictions.csv`, with one row for each test image, in the order of the tasks.

    If images have groups, the column "group" has their numbers, or is empty for images of tasks without groups.
    """
    grouped = any(part.groups for part in tasks.values())
    first = next(iter(tasks.values()))
    names = list(first.classifiers | first.baselines)
    rows: list[tuple[object, ...]] = []
    for number, part in tasks.items():
        columns = part.baselines | part.classifiers
        labels = [part.truth, *(columns[name] for name in names)]
        true, predicted, *rest = ([part.class_names[label] for label in column.tolist()] for column in labels)
        probability = [f"{value:.6f}" for value in part.probability.tolist()]
        groups = [part.groups or [""] * len(true)] if grouped else []
        rows += zip(part.images, true, predicted, probability, [number] * len(true), *groups, *rest, strict=True)
    write_csv(path, [*_COLUMNS, *[_GROUP] * grouped, *(f"{_OTHER}{name}" for name in names[1:])], rows)


@dataclass(frozen=True)
class ImageResult:
    """A row of `predictions.csv`. `position` is the image's place in its task, and `others` the other predictions."""

    image: str
    true: str
    predicted: str
    probability: float
    task: int
    position: int
    others: dict[str, str]
    group: str = ""  # the number of the image's group, or ""

    @property
    def right(self) -> bool:
        """Whether the first classifier predicts the true class."""
        return self.predicted == self.true


def read_predictions(path: Path) -> list[ImageResult]:
    """Return the rows that `write_predictions` wrote. A ValueError names the first line that is not such a row."""
    header, *rows = read_csv(path) or [[]]
    if tuple(header[: len(_COLUMNS)]) != _COLUMNS:
        raise ValueError(f"{path} begins with the columns {header[:5]}, expected {list(_COLUMNS)}")
    grouped = _GROUP in header[len(_COLUMNS) : len(_COLUMNS) + 1]
    names = [column.removeprefix(_OTHER) for column in header[len(_COLUMNS) + grouped :]]
    results: list[ImageResult] = []
    positions: dict[int, int] = {}
    for line, row in enumerate(rows, 2):
        try:
            image, true, predicted, probability, task, *rest = row
            group = rest.pop(0) if grouped else ""
            number, others = int(task), dict(zip(names, rest, strict=True))
            position = positions[number] = positions.get(number, -1) + 1
            results.append(ImageResult(image, true, predicted, float(probability), number, position, others, group))
        except ValueError as error:
            raise ValueError(f"line {line} of {path} is not as a run writes it: {error}") from error
    return results
