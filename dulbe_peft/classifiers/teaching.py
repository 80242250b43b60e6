"""Teach every classifier a task's classes at the end of the task, from the features of the trained model."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.classifiers.novelty import sharing

TEACHING = "teach "  # followed by a classifier's name: the name of the phase in which it learns a task


@dataclass(frozen=True)
class ClosingPass:
    """The classes of a task, the unit features, (n, d), of its images after training, and their labels, (n,).

    Attributes:
        class_names: Names of the task's classes.
        features: Unit features of the training images, by the trained model.
        labels: Indices into `class_names`.
        before: Features of the same images by the model before the task, or None if no classifier needs them.
        texts: (C_seen, d), text embeddings of all seen classes, or None if no classifier needs them.
        each_text: Embeddings of every text of the task's classes, (T, d), and the class of each text, (T,).
        views: (n, V, d), features of each image and its augmented views, or None without augmentation.
        groups: Groups of the images, (n,), int64, or None; see `Classifier.add_classes`.
        projection: W, (text_dim, d), by which the features are projected before they are compared with texts, or None
            if they are compared as they are.
        head: (classes, d + 1), rows of a linear head that the strategy trained on the task, or None.
    """

    class_names: tuple[str, ...]
    features: Tensor
    labels: Tensor
    before: Tensor | None = None
    texts: Tensor | None = None
    each_text: tuple[Tensor, Tensor] | None = None
    views: Tensor | None = None
    head: Tensor | None = None
    groups: Tensor | None = None
    projection: Tensor | None = None


@torch.no_grad()
def learn_task(
    classifiers: Mapping[str, Classifier],
    closing: ClosingPass,
    drift: str = "auto",
    text_embeds: str = "current",
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Classifier]:
    """Return copies of the classifiers that have also learned the task's classes; the given ones do not change.

    `drift` and `text_embeds` are as in `LearnerArguments`. `phase` measures the time of each classifier.
    """
    made = {name: classifier.fork() for name, classifier in classifiers.items()}
    old, texts = len(next(iter(made.values())).class_names), closing.texts
    before = closing.before if old and drift != "none" else None
    with sharing():
        for classifier in made.values():
            if closing.projection is not None and classifier.rule.text_dim:
                classifier.install({"projection": closing.projection})
            text = texts if classifier.reads_text else None
            if texts is not None and text is not None and text_embeds == "at_introduction":
                text = torch.cat([classifier.text_embeds.to(texts), texts[old:]])
            if old and text is not None:
                classifier.move_texts(text[:old])
            with phase(f"{TEACHING}{classifier.name}"):
                if before is not None and drift == "linear":
                    classifier.move(linear_map(before, closing.features))
                elif before is not None:
                    classifier.follow(before, closing.features, closing.labels)
                new = (list(closing.class_names), closing.features, closing.labels, text)
                each, views, head = closing.each_text, closing.views, closing.head
                classifier.add_classes(*new, each_text=each, views=views, head=head, groups=closing.groups)
    return made
