"""How well a model still tells classes by their names alone, also classes that it never learned.

All figures are of the text classifier: the class whose text embedding is nearest to the image's feature. A test set is
a pair of images and the class names that their labels index.
"""

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from dulbe_peft.data.images import named_images
from dulbe_peft.metrics.evaluation import nearest
from dulbe_peft.utils.settings import check_number

Tests = Sequence[tuple[Any, Sequence[str]]]


class Embeds(Protocol):
    """A learner, as far as it embeds class names and images."""

    def text_embeds(self, class_names: Sequence[str]) -> torch.Tensor: ...

    def image_embeds(self, images: Any) -> torch.Tensor: ...


class Scales(Embeds, Protocol):
    """A learner whose update can be scaled, down to the pristine model."""

    def zero_shot(self, tests: Tests) -> list[float | None]: ...

    def scaled(self, scale: float) -> AbstractContextManager[None]: ...


@torch.no_grad()
def seen_accuracies(learner: Embeds, tests: Tests) -> list[float | None]:
    """A_t, t = 1, 2, ...: accuracy on the first t test sets together, among their classes, by the model as it is."""
    text = learner.text_embeds([name for _, names in tests for name in names])
    encoded, classes, found = [], 0, []
    for dataset, names in tests:
        if dataset is not None and names:
            images = named_images(dataset, names)
            encoded.append((learner.image_embeds(images), torch.as_tensor(images.labels) + classes))
        classes += len(names)
        right = [(nearest(features, text[:classes]) == labels).tolist() for features, labels in encoded]
        hits = list(itertools.chain(*right))
        found.append(sum(hits) / len(hits) if hits else None)
    return found


def zero_shot_retention(
    learner: Scales,
    dataset: Any,
    class_names: Sequence[str] | None = None,
    scales: Sequence[float] = (1.0,),
    learned: Tests = (),
) -> dict[str, Any]:
    """What a learner still knows of classes that it never learned, and what a smaller scale would give and cost.

    `dataset` has images of classes that were not learned, and `learned` are test sets of learned ones; the classifier
    chooses among the classes of either. `scales` say how much of the learned update to use, see
    `ClassIncrementalLearner.scaled`; 0 and 1 are always there.

    The result has "before" and "after", accuracy on `dataset` by the pristine model and by the learner, and "scales":
    for each scale from 0 to 1 "scale", "unlearned", the accuracy on `dataset`, and "learned", on `learned` or None.

    Reference:
        Wortsman et al., "Robust fine-tuning of zero-shot models", 2022: the curve over the scale.
    """
    dataset = named_images(dataset, class_names)
    for scale in scales:
        check_number("scale", scale, least=0, most=1)
    groups: list[Tests] = [[(dataset, dataset.class_names)], *([learned] if learned else [])]
    rows = []
    for scale in sorted({0.0, 1.0, *scales}):
        if scale == 0:
            found = [learner.zero_shot(tests)[-1] for tests in groups]
        else:
            with learner.scaled(scale):
                found = [seen_accuracies(learner, tests)[-1] for tests in groups]
        rows.append({"scale": float(scale), "unlearned": found[0], "learned": found[1] if learned else None})
    return {"before": rows[0]["unlearned"], "after": rows[-1]["unlearned"], "scales": rows}
