"""The features of a stream, task by task, which a run saves so that classifiers can be compared on them later.

Training does not depend on the classifiers, so one trained stream serves all of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.classifiers.teaching import ClosingPass, learn_task
from dulbe_peft.metrics.evaluation import answers
from dulbe_peft.utils.tensors import read_tensors, write_tensors
from dulbe_peft.utils.torch_settings import seeded_randomness

FEATURES_FOLDER = "features"
SUFFIX = ".safetensors"
_CLOSING = ("features", "labels", "before", "views", "texts", "projection")  # the tensors of a closing pass
_EACH_TEXT = ("each text", "class of each text")
_FORMAT = "dulbe_peft task features 1"


@dataclass(frozen=True)
class TaskFeatures:
    """The features that the classifiers learn from in one task, and those that they are tested on after it."""

    closing: ClosingPass  # its text embeddings come from the model after the task, even if no classifier needs them
    # The number of a task, from 1 -> the features of its test images, (n, d), and their labels, (n,).
    tests: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def write(self, path: Path) -> None:
        closing = self.closing
        optional = {name: getattr(closing, name) for name in _CLOSING}
        optional |= zip(_EACH_TEXT, closing.each_text or (), strict=False)
        for number, (features, truth) in self.tests.items():
            optional |= {f"test {number}": features, f"truth {number}": truth}
        names = json.dumps(closing.class_names, ensure_ascii=False)
        tensors = {name: tensor for name, tensor in optional.items() if tensor is not None}
        write_tensors(path, tensors, {"format": _FORMAT, "class_names": names})

    @classmethod
    def read(cls, path: Path) -> Self:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')!r}, expected {_FORMAT!r}")
        try:
            names = tuple(json.loads(metadata["class_names"]))
            each = (tensors[_EACH_TEXT[0]], tensors[_EACH_TEXT[1]]) if _EACH_TEXT[0] in tensors else None
            closing = ClosingPass(names, **{n: tensors[n] for n in _CLOSING if n in tensors}, each_text=each)
            numbers = sorted(int(name.removeprefix("test ")) for name in tensors if name.startswith("test "))
            tests = {number: (tensors[f"test {number}"], tensors[f"truth {number}"]) for number in numbers}
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not as a run writes it: {error!r}") from error
        return cls(closing, tests)


def read_features(run: str | Path) -> list[TaskFeatures]:
    """Return the features that a run saved, one entry for each finished task."""
    folder = Path(run) / FEATURES_FOLDER
    paths = sorted(folder.glob(f"task-*{SUFFIX}"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no features: run the stream with keep_features=True")
    return [TaskFeatures.read(path) for path in paths]


@dataclass(frozen=True)
class Answers:
    """The predictions of one classifier for the n test images after one task, in the order of the tasks."""

    truth: torch.Tensor
    predicted: torch.Tensor
    probability: torch.Tensor  # of the predicted class
    task: torch.Tensor  # the number, from 1, of the task that each image belongs to

    @property
    def right(self) -> torch.Tensor:
        return self.predicted == self.truth


@torch.no_grad()
def learn_from_features(
    tasks: Sequence[TaskFeatures],
    spec: str,
    logit_scale: float,
    drift: str = "none",
    text_embeds: str = "current",
    seed: int = 0,
) -> tuple[list[Answers], Classifier]:
    """Train one classifier on the saved features of a stream.

    Returns:
        The predictions after each task, and the trained classifier.
    """
    absent = [task.closing.before is None for task in tasks[1:]]
    if any(absent) and (drift == "linear" or not all(absent)):
        raise ValueError(
            f"drift is {drift!r}, but the features before each task were not saved: train the stream with a drift "
            "other than 'none'"
        )
    name = spec.partition(":")[0]
    first = tasks[0].closing
    text_dim = 0 if first.projection is None else len(first.projection)
    classifiers = {name: make_classifier(spec, first.features.shape[1], logit_scale, text_dim)}
    if classifiers[name].needs_text and any(task.closing.texts is None for task in tasks):
        raise ValueError(f"the classifier {name!r} needs text, and the model of this stream has no text tower")
    after_each_task = []
    for index, task in enumerate(tasks):
        with seeded_randomness(seed, index):
            classifiers = learn_task(classifiers, task.closing, drift, text_embeds)
        after_each_task.append(_answers(classifiers[name], task))
    return after_each_task, classifiers[name]


def _answers(classifier: Classifier, task: TaskFeatures) -> Answers:
    empty = torch.zeros(0, dtype=torch.int64)
    parts = [Answers(empty, empty, empty.float(), empty)]
    predictions = answers(classifier, [features for features, _ in task.tests.values()])
    for (number, (_, truth)), (predicted, probability) in zip(task.tests.items(), predictions, strict=True):
        parts.append(Answers(truth, predicted, probability, torch.full((len(truth),), number)))
    return Answers(*map(torch.cat, zip(*(vars(part).values() for part in parts), strict=True)))
