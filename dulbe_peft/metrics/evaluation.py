"""What every classifier says of each image of a data set, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.classifiers import Classifier
from dulbe_peft.utils.files import read_csv, write_csv

PREDICTIONS_FILE = "predictions.csv"
# What is compared with the classifiers, and stands in the results beside them where a classifier keeps what it needs.
BASELINES = ("text", "class_means")
_COLUMNS = ("image", "class", "predicted", "probability", "task")
_OTHER = "predicted_"


@dataclass(frozen=True)
class Evaluation:
    """What was predicted for each of n images of a data set; integers are int64, on the CPU, and index `class_names`.

    Attributes:
        class_names: all seen classes.
        images: what each image is called.
        truth: (n,).
        classifiers: classifier -> its predictions, (n,); the first one is what `predict` uses.
        baselines: "text", nearest text embedding, and "class_means", nearest class mean -> predictions, (n,), where a
            classifier keeps what it needs and no classifier of its own does the same.
        probability: (n,), float32, calibrated probability of the first classifier's prediction.
        features: (n, d), float32, the images' unit features, on the CPU.
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
        figures: dict[str, Any] = {
            "accuracy": next(iter(accuracies.values())),
            "classifiers": accuracies,
            "num_images": float(len(self.truth)),
        }
        return figures | {f"{name}_accuracy": self.accuracy(rows) for name, rows in self.baselines.items()}

    def accuracy(self, predicted: torch.Tensor) -> float:
        """The share of images whose prediction, (n,), is right."""
        return (predicted == self.truth).double().mean().item()

    def images_by_class(self) -> dict[str, int]:
        """Class -> how many of the images show it; classes without an image are left out."""
        counts = torch.bincount(self.truth, minlength=len(self.class_names)).tolist()
        return {name: count for name, count in zip(self.class_names, counts, strict=True) if count}

    def right_by_class(self, predicted: torch.Tensor) -> dict[str, int]:
        """Class -> how many of its images the prediction, (n,), names right; classes without an image are left out."""
        right = torch.bincount(self.truth[predicted == self.truth], minlength=len(self.class_names)).tolist()
        shown = self.images_by_class()
        return {name: count for name, count in zip(self.class_names, right, strict=True) if name in shown}


@torch.no_grad()
def evaluate_features(
    classifiers: Mapping[str, Classifier],
    features: torch.Tensor,
    truth: torch.Tensor,
    class_names: Sequence[str],
    images: Sequence[str],
) -> Evaluation:
    """Ask every classifier, and the two baselines, about the same features, (n, d), with classes `truth`, (n,)."""
    logits = {name: classifier(features) for name, classifier in classifiers.items()}
    first = next(iter(classifiers))
    sure = (logits[first] / classifiers[first].temperature).softmax(dim=1).amax(dim=1)
    prototypes = {} if "prototype" in classifiers else {"class_means": "visual_prototypes"}
    found = {}
    for name, attribute in {"text": "text_embeds", **prototypes}.items():
        kept: Any = next((getattr(c, attribute) for c in classifiers.values() if hasattr(c, attribute)), None)
        if kept is not None:
            found[name] = (features @ kept.to(features).T).argmax(dim=1).cpu()
    return Evaluation(
        class_names=tuple(class_names),
        images=tuple(images),
        truth=truth.cpu(),
        classifiers={name: scores.argmax(dim=1).cpu() for name, scores in logits.items()},
        baselines=found,
        probability=sure.float().cpu(),
        features=features.cpu(),
    )


def write_predictions(path: Path, tasks: Mapping[int, Evaluation]) -> None:
    """Write `predictions.csv`: a row for each test image, those of the first task first."""
    first = next(iter(tasks.values()))
    main, *others = first.classifiers
    others += [name for name in first.baselines if name not in first.classifiers]
    rows = []
    for number, part in tasks.items():
        names, columns = part.class_names, part.baselines | part.classifiers
        for row, image in enumerate(part.images):
            said = [names[int(columns[name][row])] for name in (main, *others)]
            probability = f"{float(part.probability[row]):.6f}"
            rows.append([image, names[int(part.truth[row])], said[0], probability, number, *said[1:]])
    write_csv(path, [*_COLUMNS, *(f"{_OTHER}{name}" for name in others)], rows)


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
