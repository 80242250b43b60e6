"""Find test images that a learner has also learned, and the training image nearest to each test image."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.data.inventory import ALIKE
from dulbe_peft.photos.data.looking import NEAR, picture_of
from dulbe_peft.photos.report.run_folder import Copy
from dulbe_peft.utils.processes import world

_MOST = 100_000  # training images whose features are held in memory at once
_ALIKE = 0.9  # cosine similarity above which the pixels of two images are compared
Place = tuple[int, int]  # the number of a task, from 1, and the position of a test image in it


@dataclass
class Neighbours:
    """Test images that were also learned, and for each test image the nearest training image, as data and index."""

    copies: list[Copy] = field(default_factory=list)
    nearest: dict[Place, tuple[LabelledImages, int]] = field(default_factory=dict)


def find_neighbours(learner: ClassIncrementalLearner, trains: Sequence[object], tests: Sequence[object]) -> Neighbours:
    """Compare the test images of all tasks with the images that were learned.

    Identical files are found among all images that were ever learned. Near copies and nearest neighbours are found
    only among `trains`, and only if the model was not trained, because they need the features in the store.
    """
    result, learned, encoder = Neighbours(), learner.state.known.class_of(), learner.encoder
    parts = [labelled_images(train) for train in trains]
    train = [(part, index) for part in parts for index in range(len(part))]

    def embeds(images: LabelledImages) -> torch.Tensor:
        return encoder.dataset_embeds(encoder.images(images))

    features = None
    # With several processes, only one of them writes pictures, and it cannot encode images without the others.
    if not encoder.adapted and encoder.store is not None and 0 < len(train) <= _MOST and world()[1] == 1:
        features = torch.cat([embeds(part) for part in parts])
    for number, test in enumerate(tests, 1):
        if test is None:
            continue
        images = labelled_images(test)
        near = [(0.0, 0)] * len(images)  # cosine similarity and index of the nearest training image
        if features is not None:
            best = [(part @ features.T).max(dim=1) for part in embeds(images).split(1024)]
            near = [pair for top in best for pair in zip(top.values.tolist(), top.indices.tolist(), strict=True)]
            result.nearest |= {(number, position): train[where] for position, (_, where) in enumerate(near)}
        for position, (content, (cosine, where)) in enumerate(zip(images.contents(), near, strict=True)):
            if content is not None and content in learned:
                result.copies.append(Copy(task=number, position=position, how=ALIKE[0], of=learned[content]))
            elif cosine > _ALIKE and picture_of(images, position).grey @ picture_of(*train[where]).grey > NEAR:
                of, row = train[where]
                copy = Copy(task=number, position=position, how=ALIKE[2], of=of.class_names[of.labels[row]])
                result.copies.append(copy)
    return result
