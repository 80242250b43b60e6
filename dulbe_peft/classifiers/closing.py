"""The end of a task: every classifier takes in the task's classes, from the features that the finished model gives."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier

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


def linear_map(before: Tensor, after: Tensor, ridge: float = 0.03) -> Tensor:
    """The linear map M, (d, d), that takes unit features, (n, d), before a task to those after it.

        M = argmin |Z M - Z_after|^2 + lambda |M - I|^2 = (Z'Z + lambda I)^-1 (Z'Z_after + lambda I)

    `ridge` is lambda over the mean eigenvalue of Z'Z. Directions without images of the task stay as they were.

    >>> linear_map(torch.eye(2), 2 * torch.eye(2), ridge=1e-9).round(decimals=3).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    if before.ndim != 2 or before.shape != after.shape or not len(before):
        raise ValueError(f"before and after must both be (n, d), got {tuple(before.shape)} and {tuple(after.shape)}")
    old, new = before.detach().cpu().double(), after.detach().cpu().double()
    gram = old.T @ old
    pull = ridge * gram.trace() / len(gram) * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + pull, old.T @ new + pull)


@torch.no_grad()
def learn_task(
    classifiers: Mapping[str, Classifier],
    closing: ClosingPass,
    drift: str = "none",
    text_embeds: str = "current",
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Classifier]:
    """Every classifier with the task's classes; the given ones stay as they are.

    `drift` and `text_embeds` are as in `LearnerArguments`. `phase` times each one.
    """
    made = {name: classifier.fork() for name, classifier in classifiers.items()}
    old, texts = len(next(iter(made.values())).class_names), closing.texts
    map_ = None
    if drift == "linear" and old and closing.before is not None:
        map_ = linear_map(closing.before, closing.features)
    for classifier in made.values():
        text = texts
        if texts is not None and classifier.reads_text and text_embeds == "at_introduction":
            text = torch.cat([classifier.text_embeds.to(texts), texts[old:]])
        with phase(f"{TEACHING}{classifier.name}"):
            if map_ is not None:
                classifier.move(map_)
            new = (list(closing.class_names), closing.features, closing.labels, text)
            classifier.add_classes(*new, each_text=closing.each_text, views=closing.views)
    return made
