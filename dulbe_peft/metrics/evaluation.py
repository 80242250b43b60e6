"""What every classifier says of each image of a data set, and the figures that follow from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import answering
from dulbe_peft.utils.files import read_csv, write_csv

PREDICTIONS_FILE = "predictions.csv"
# What is compared with the classifiers, and stands in the results beside them where a classifier keeps what it needs.
BASELINES = ("text", "class_means")
MOST_SCORES = 2**22  # in memory at a time
_COLUMNS = ("image", "class", "predicted", "probability", "task")
_OTHER = "predicted_"


@dataclass(frozen=True)
class Evaluation:
    """What was predicted for each of n images of a data set; integers are int64, on the CPU, and index `class_names`.

    `truth` and each classifier's predictions are (n,); the first classifier is what `predict` uses, and `probability`,
    (n,), is its calibrated one. `baselines` has "text", nearest text embedding, and "class_means", nearest class mean,
    where a classifier keeps what it needs and no classifier of its own does the same. `features`, (n, d), are unit.
    """

    class_names: tuple[str, ...]
    images: tuple[str, ...]
    truth: torch.Tensor
    classifiers: dict[str, torch.Tensor]
    baselines: dict[str, torch.Tensor]
    probability: torch.Tensor
    features: torch.Tensor

    def figures(self) -> dict[str, Any]:
        """Top-1 accuracies, see `ClassIncrementalLearner.evaluate`."""
        accuracies = {name: self.accuracy(rows) for name, rows in self.classifiers.items()}
        figures = {f"{name}_accuracy": self.accuracy(rows) for name, rows in self.baselines.items()}
        first, number = answering(accuracies), float(len(self.truth))
        return {"accuracy": accuracies[first], "classifiers": accuracies, "num_images": number, **figures}

    def accuracy(self, predicted: torch.Tensor) -> float:
        """The share of images whose prediction, (n,), is right."""
        return (predicted == self.truth).double().mean().item()


@dataclass(frozen=True)
class EncodedTest:
    """Features, (n, d), of a data set's images, with their classes `truth`, (n,), and their names."""

    features: torch.Tensor
    truth: torch.Tensor
    images: Sequence[str]


@torch.no_grad()
def evaluate_features(
    classifiers: Mapping[str, Classifier], tests: Sequence[EncodedTest], class_names: Sequence[str]
) -> list[Evaluation]:
    """Ask every classifier, and the two baselines, about the same features of each test."""
    parts, kept = [test.features for test in tests], dict[str, torch.Tensor]()
    prototypes = {} if "prototype" in classifiers else {"class_means": "visual_prototypes"}
    for name, attribute in {"text": "text_embeds", **prototypes}.items():
        rows: Any = next((getattr(c, attribute) for c in classifiers.values() if hasattr(c, attribute)), None)
        if rows is not None and parts and rows.any(dim=1).all():  # zeros stand for texts that a model does not have
            kept[name] = rows.to(parts[0])
    said = {name: answers(classifier, parts) for name, classifier in classifiers.items()}
    return [
        Evaluation(
            class_names=tuple(class_names),
            images=tuple(test.images),
            truth=test.truth.cpu(),
            classifiers={name: of[number][0] for name, of in said.items()},
            baselines={name: nearest(test.features, rows) for name, rows in kept.items()},
            probability=said[answering(classifiers)][number][1],
            features=test.features.cpu(),
        )
        for number, test in enumerate(tests)
    ]


def answers(classifier: Classifier, tests: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each test, the class that each of its features, (n, d), is taken for, and its calibrated probability.

    Both are (n,), on the CPU. What is said of a test does not depend on which other tests there are.
    """
    if not tests:
        return []
    temperature, most = classifier.temperature, max(1, MOST_SCORES // len(classifier.class_names))
    parts, found = [part for test in tests for part in test.split(most)], []
    for group in _grouped(parts, most):
        scores = classifier.part_by_part(torch.cat(group), [len(part) for part in group])
        sure = (scores / temperature).softmax(dim=1).amax(dim=1)
        found.append((scores.argmax(dim=1).cpu(), sure.float().cpu()))
    predicted, probability = (torch.cat(rows).split([*map(len, tests)]) for rows in zip(*found, strict=True))
    return list(zip(predicted, probability, strict=True))


def _grouped(parts: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """The parts in their order, as many at a time as have `most` rows together."""
    group, rows = list[torch.Tensor](), 0
    for part in parts:
        if group and rows + len(part) > most:
            yield group
            group, rows = [], 0
        group.append(part)
        rows += len(part)
    yield group


def nearest(features: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The number of the row, (C, d), that is most similar to each of the features, (n, d); on the CPU."""
    parts = features.split(max(1, MOST_SCORES // len(rows)))
    return torch.cat([(part @ rows.T).argmax(dim=1).cpu() for part in parts])


def write_predictions(path: Path, tasks: Mapping[int, Evaluation]) -> None:
    """Write `predictions.csv`: a row for each test image, those of the first task first."""
    first = next(iter(tasks.values()))
    names = list(first.classifiers | first.baselines)
    rows: list[Any] = []
    for number, part in tasks.items():
        columns = part.baselines | part.classifiers
        labels = [part.truth, *(columns[name] for name in names)]
        true, said, *rest = ([part.class_names[label] for label in column.tolist()] for column in labels)
        sure = [f"{value:.6f}" for value in part.probability.tolist()]
        rows += zip(part.images, true, said, sure, [number] * len(sure), *rest, strict=True)
    write_csv(path, [*_COLUMNS, *(f"{_OTHER}{name}" for name in names[1:])], rows)


@dataclass(frozen=True)
class ImageResult:
    """A row of `predictions.csv`; `position` is the image's place in its task, `others` are what others said."""

    image: str
    true: str
    predicted: str
    probability: float
    task: int
    position: int
    others: dict[str, str]

    @property
    def right(self) -> bool:
        """Whether the first classifier names the class right."""
        return self.predicted == self.true


def read_predictions(path: Path) -> list[ImageResult]:
    """What `write_predictions` wrote; a ValueError names the line that is no row of it."""
    header, *rows = read_csv(path) or [[]]
    if tuple(header[: len(_COLUMNS)]) != _COLUMNS:
        raise ValueError(f"{path} begins with the columns {header[:5]}, expected {list(_COLUMNS)}")
    names = [column.removeprefix(_OTHER) for column in header[len(_COLUMNS) :]]
    found: list[ImageResult] = []
    positions: dict[int, int] = {}
    for line, row in enumerate(rows, 2):
        try:
            image, true, predicted, probability, task, *others = row
            number, said = int(task), dict(zip(names, others, strict=True))
            position = positions[number] = positions.get(number, -1) + 1
            found.append(ImageResult(image, true, predicted, float(probability), number, position, said))
        except ValueError as error:
            raise ValueError(f"line {line} of {path} is not as a run writes it: {error}") from error
    return found
