"""The end of a task: every classifier takes in the task's classes, from the features that the finished model gives."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.drift import linear_map

TEACHING = "teach "  # and a classifier's name: what the phase is called in which it takes in a task


@dataclass(frozen=True)
class ClosingPass:
    """A task's classes, its training images' unit features, (n, d), by the finished model, and their labels, (n,).

    `before` are the same images' features by the model before the task; None where nobody needed them.
    `texts`, (C_seen, d), are the embeddings of all seen classes, where a classifier needs them, and `each_text` those
    of every text of the task's classes, (T, d), with the class of each, (T,). `views`, (n, V, d), are the features of
    each image and its augmented views, where there are some.
    """

    class_names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    before: Tensor | None = None
    texts: Tensor | None = None
    each_text: tuple[Tensor, Tensor] | None = None
    views: Tensor | None = None


@torch.no_grad()
def learn_task(
    classifiers: Mapping[str, Classifier],
    closing: ClosingPass,
    drift: str = "auto",
    text_embeds: str = "current",
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Classifier]:
    """Every classifier with the task's classes; the given ones stay as they are.

    `drift` and `text_embeds` are as in `LearnerArguments`. `phase` times each one.
    """
    made = {name: classifier.fork() for name, classifier in classifiers.items()}
    old, texts = len(next(iter(made.values())).class_names), closing.texts
    before = closing.before if old and drift != "none" else None
    for classifier in made.values():
        text = texts
        if texts is not None and classifier.reads_text and text_embeds == "at_introduction":
            text = torch.cat([classifier.text_embeds.to(texts), texts[old:]])
        with phase(f"{TEACHING}{classifier.name}"):
            if before is not None and drift == "linear":
                classifier.move(linear_map(before, closing.features))
            elif before is not None:
                classifier.follow(before, closing.features, closing.labels)
            new = (list(closing.class_names), closing.features, closing.labels, text)
            classifier.add_classes(*new, each_text=closing.each_text, views=closing.views)
    return made
