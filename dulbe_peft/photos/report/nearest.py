"""Which test images a learner has learned, too, and the training image that is nearest to each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.data.inventory import ALIKE, NEAR, thumbnail
from dulbe_peft.photos.report.run_folder import Copy
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
    found, learned, encoder = Neighbours(), learner.state.known.class_of(), learner.encoder
    parts = [labelled_images(train) for train in trains]
    train = [(part, index) for part in parts for index in range(len(part))]

    def embeds(images: LabelledImages) -> torch.Tensor:
        return encoder.dataset_embeds(encoder.images(images))

    features = None
    # Where several processes encode together, there are none: one alone writes pictures.
    if not encoder.adapted and encoder.store is not None and 0 < len(train) <= _MOST and world()[1] == 1:
        features = torch.cat([embeds(part) for part in parts])
    for number, test in enumerate(tests, 1):
        if test is None:
            continue
        images = labelled_images(test)
        near = [(0.0, 0)] * len(images)  # cosine, and which training image
        if features is not None:
            best = [(part @ features.T).max(dim=1) for part in embeds(images).split(1024)]
            near = [pair for top in best for pair in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
            found.nearest |= {(number, position): train[where] for position, (_, where) in enumerate(near)}
        for position, (content, (cosine, where)) in enumerate(zip(images.contents(), near, strict=True)):
            if content is not None and content in learned:
                found.copies.append(Copy(task=number, position=position, how=ALIKE[0], of=learned[content]))
            elif cosine > _ALIKE and thumbnail(images, position).grey @ thumbnail(*train[where]).grey > NEAR:
                of, row = train[where]
                copy = Copy(task=number, position=position, how=ALIKE[2], of=of.class_names[of.labels[row]])
                found.copies.append(copy)
    return found
