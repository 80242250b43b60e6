"""The features of a stream, task by task: kept by a run, and shown to classifiers that are chosen later.

Training never looks at a classifier, so one trained stream serves every classifier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.classifiers import Classifier, make_classifier
from dulbe_peft.classifiers.teaching import ClosingPass, learn_task
from dulbe_peft.utils.devices import own_randomness
from dulbe_peft.utils.tensors import read_tensors, write_tensors

FEATURES_FOLDER = "features"
SUFFIX = ".safetensors"
_FORMAT = "dulbe_peft task features 1"


@dataclass(frozen=True)
class TaskFeatures:
    """What the classifiers see of one task.

    `texts`, (C_seen, d), are of all seen classes by the model after the task; None without text. `tests` has, by a
    task's number from 1, the features of its test images by this model, (n, d), and their classes, (n,).
    """

    closing: ClosingPass
    texts: torch.Tensor | None
    tests: dict[int, tuple[torch.Tensor, torch.Tensor]]

    def write(self, path: Path) -> None:
        tensors = {"features": self.closing.features, "labels": self.closing.labels}
        if self.closing.before is not None:
            tensors["before"] = self.closing.before
        if self.texts is not None:
            tensors["texts"] = self.texts
        for number, (features, truth) in self.tests.items():
            tensors |= {f"test {number}": features, f"truth {number}": truth}
        names = json.dumps(self.closing.class_names, ensure_ascii=False)
        write_tensors(path, tensors, {"format": _FORMAT, "class_names": names})

    @classmethod
    def read(cls, path: Path) -> TaskFeatures:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} has the format {metadata.get('format')!r}, expected {_FORMAT!r}")
        try:
            names = tuple(json.loads(metadata["class_names"]))
            closing = ClosingPass(names, tensors["features"], tensors["labels"], tensors.get("before"))
            numbers = sorted(int(name.removeprefix("test ")) for name in tensors if name.startswith("test "))
            tests = {number: (tensors[f"test {number}"], tensors[f"truth {number}"]) for number in numbers}
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not as a run writes it: {error!r}") from error
        return cls(closing, tensors.get("texts"), tests)


def read_features(run: str | Path) -> list[TaskFeatures]:
    """The features that a run kept, one entry for each finished task."""
    folder = Path(run) / FEATURES_FOLDER
    paths = sorted(folder.glob(f"task-*{SUFFIX}"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no features: run the stream with keep_features=True")
    return [TaskFeatures.read(path) for path in paths]


@dataclass(frozen=True)
class Answers:
    """What one classifier says of the n test images after one task; those of the first task come first.

    `probability` is that of the predicted class, and `task` the number, from 1, of the task that an image tests.
    """

    truth: torch.Tensor
    predicted: torch.Tensor
    probability: torch.Tensor
    task: torch.Tensor

    @property
    def right(self) -> torch.Tensor:
        """(n,), bool."""
        return self.predicted == self.truth


@torch.no_grad()
def learn_from_features(
    tasks: Sequence[TaskFeatures],
    spec: str,
    logit_scale: float,
    drift: str = "none",
    text_embeds: str = "current",
    seed: int = 0,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[list[Answers], Classifier]:
    """Teach one classifier a stream whose features are known, and test it after every task.

    The answers are those of a learner that had the classifier while the stream was trained; `drift` and `text_embeds`
    are as in `LearnerArguments`. Returns the answers after each task, and the classifier after the last one.
    """
    if drift == "linear" and any(task.closing.before is None for task in tasks[1:]):
        raise ValueError("drift is 'linear', but the features before each task were not kept: train with drift linear")
    name = spec.partition(":")[0]
    made = {name: make_classifier(spec, tasks[0].closing.features.shape[1], logit_scale, defaults)}
    if made[name].needs_text and any(task.texts is None for task in tasks):
        raise ValueError(f"the classifier {name!r} needs text, and the model of this stream has no text tower")
    found = []
    for index, task in enumerate(tasks):
        with own_randomness(seed, index):
            made = learn_task(made, task.closing, task.texts, drift, text_embeds)
        found.append(_answers(made[name], task))
    return found, made[name]


def _answers(classifier: Classifier, task: TaskFeatures) -> Answers:
    numbers = [torch.full((len(truth),), number) for number, (_, truth) in task.tests.items()]
    if not numbers:
        nothing = torch.zeros(0, dtype=torch.int64)
        return Answers(nothing, nothing, nothing.float(), nothing)
    # Task by task, as a run asks: a product of matrices is not rounded alike in batches of another size.
    logits = torch.cat([classifier(features) for features, _ in task.tests.values()])
    best = (logits / classifier.temperature).softmax(dim=1).amax(dim=1)
    truth = torch.cat([truth for _, truth in task.tests.values()])
    return Answers(truth, logits.argmax(dim=1), best, torch.cat(numbers))
