"""Which test images a learner has learned, too, and the training image that is nearest to each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.data.inventory import ALIKE, NEAR, grey_thumbnail
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.report.run_folder import Copy
from dulbe_peft.utils.processes import world

_MOST = 100_000  # training images, whose features are in memory at once
_ALIKE = 0.9  # cosine from which two images are compared by their pixels
Place = tuple[int, int]  # a task, counted from 1, and the position of a test image in it


@dataclass
class Neighbours:
    """The copies among the test images, and the nearest training image where features and files are at hand."""

    copies: list[Copy] = field(default_factory=list)
    nearest: dict[Place, tuple[LabelledImages, int]] = field(default_factory=dict)


def neighbours(learner: ClassIncrementalLearner, trains: Sequence[Any], tests: Sequence[Any]) -> Neighbours:
    """Compare the test images of all tasks with what was learned; `trains` are those training images that are open.

    Copies are found by content, of whatever was ever learned. Near copies and neighbours are found by the features
    that the store keeps, so only where the model is not trained.
    """
    found, learned = Neighbours(), learner.state.known.class_of()
    train, features = _stored_features(learner, trains)
    for number, test in enumerate(tests, 1):
        if test is None:
            continue
        images = labelled_images(test)
        places = None if features is None else _nearest(learner, images, features)
        for position, content in enumerate(images.contents()):
            where, cosine = (0, 0.0) if places is None else (places[0][position], places[1][position])
            if places is not None:
                found.nearest[number, position] = train[where]
            if content is not None and content in learned:
                found.copies.append(Copy(task=number, position=position, how=ALIKE[0], of=learned[content]))
            elif cosine > _ALIKE and grey_thumbnail(images, position) @ grey_thumbnail(*train[where]) > NEAR:
                of, row = train[where]
                copy = Copy(task=number, position=position, how=ALIKE[2], of=of.class_names[of.labels[row]])
                found.copies.append(copy)
    return found


def _stored_features(
    learner: ClassIncrementalLearner, trains: Sequence[Any]
) -> tuple[list[tuple[LabelledImages, int]], torch.Tensor | None]:
    """The training images one by one, and their features; None where the store cannot have them.

    Nor are there any where several processes encode together, for one alone writes pictures.
    """
    parts = [labelled_images(train) for train in trains]
    train = [(part, index) for part in parts for index in range(len(part))]
    encoder = learner.encoder
    if encoder.adapted or encoder.store is None or not 0 < len(train) <= _MOST or world()[1] > 1:
        return train, None
    return train, torch.cat([encoder.dataset_embeds(encoder.images(part)) for part in parts])


def _nearest(
    learner: ClassIncrementalLearner, images: LabelledImages, features: torch.Tensor
) -> tuple[list[int], list[float]]:
    """The row of the nearest features for each image, and its cosine."""
    own = learner.encoder.dataset_embeds(learner.encoder.images(images))
    best = [(part @ features.T).max(dim=1) for part in own.split(1024)]
    return torch.cat([b.indices for b in best]).tolist(), torch.cat([b.values for b in best]).tolist()
