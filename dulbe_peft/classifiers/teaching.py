"""The end of a task: every classifier takes in the task's classes, from the features that the finished model gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dulbe_peft.classifiers import Classifier
from dulbe_peft.classifiers.drift import linear_map


@dataclass(frozen=True)
class ClosingPass:
    """What the closing pass over a task's training images has seen.

    Attributes:
        class_names: the task's classes.
        features: (n, d), unit features by the model after the task.
        labels: (n,), integers that index `class_names`.
        before: (n, d), the same images' features by the model before the task; None where nobody needed them.
    """

    class_names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    before: Tensor | None = None


@torch.no_grad()
def learn_task(
    classifiers: Mapping[str, Classifier],
    closing: ClosingPass,
    texts: Tensor | None,
    drift: str = "none",
    text_embeds: str = "current",
) -> dict[str, Classifier]:
    """Every classifier with the task's classes; the given ones stay as they are.

    `texts`, (C_seen, d), are of all seen classes by the model after the task, the old classes' first. `drift` "linear"
    moves what is stored of old classes by the map from `closing.before` to `closing.features`. `text_embeds`
    "at_introduction" leaves the stored embeddings of old classes as they are.
    """
    made = {name: classifier.fork() for name, classifier in classifiers.items()}
    old = len(next(iter(made.values())).class_names)
    map_ = None
    if drift == "linear" and old and closing.before is not None:
        map_ = linear_map(closing.before, closing.features)
    for classifier in made.values():
        text = None
        if classifier.needs_text and texts is not None:
            kept = classifier.tensors().get("text_embeds") if text_embeds == "at_introduction" else None
            text = torch.cat([texts[:old] if kept is None else kept.to(texts), texts[old:]])
        if map_ is not None:
            classifier.move(map_)
        classifier.add_classes(list(closing.class_names), closing.features, closing.labels, text)
    return made
