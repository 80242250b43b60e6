"""The predictions of a classifier for unlabelled images."""

from dataclasses import dataclass
from typing import Any

import torch

from dulbe_peft.arguments import Query
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.encoders.encoder import Encoder


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image: its `classes`, most likely first, and their `probabilities`."""

    image: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    known: bool = True  # False if the image is too unlike everything that was learned
    novelty: float | None = None  # how unlike everything that was learned, if this was requested
    error: str | None = None  # why the image cannot be read

    def answer(self, number: int, scores: bool, several: bool) -> Any:
        """Return the best class, or a list of all classes if `several`; with `scores`, pairs (name, probability).

        If the image is not known, return None or an empty list. `number` is the image's place, for error messages.
        """
        if self.error is not None:
            raise ValueError(f"image {number} ({self.image}) cannot be read: {self.error}")
        classes = list(zip(self.classes, self.probabilities, strict=True)) if scores else list(self.classes)
        classes = classes if self.known else []
        return classes if several else next(iter(classes), None)


@torch.no_grad()
def predict_images(
    encoder: Encoder,
    classifier: Classifier,
    images: LabelledImages,
    query: Query,
) -> list[Prediction]:
    """Predict the classes of every image. An image that cannot be read has an `error`."""
    count = min(query.top_k, len(classifier.class_names))
    if not len(images):
        return []
    features, unreadable = encoder.readable_embeds(encoder.images(images), "predict", passing=True)
    readable = [index for index in range(len(images)) if index not in unreadable]
    rows = [Prediction(images.item_name(index), error=unreadable.get(index)) for index in range(len(images))]
    for chunk in torch.tensor(readable, dtype=torch.long).split(4096):
        rows_of_chunk, sizes = features[chunk.to(features.device)], [count] * len(chunk)
        refused = (
            [False] * len(chunk) if query.reject is None else classifier.refused(rows_of_chunk, query.reject).tolist()
        )
        novel = classifier.novelty(rows_of_chunk).tolist() if query.novelty else [None] * len(chunk)
        if query.coverage is not None:
            sizes = classifier.prediction_sets(rows_of_chunk, query.coverage).sum(dim=1).tolist()
        best, chosen = classifier.probabilities(rows_of_chunk).topk(max(sizes, default=1), dim=1)
        results = zip(chunk.tolist(), sizes, best.tolist(), chosen.tolist(), refused, novel, strict=True)
        for index, size, values, classes, unknown, distance in results:
            names = tuple(classifier.class_names[label] for label in classes[:size])
            rows[index] = Prediction(rows[index].image, names, tuple(values[:size]), not unknown, distance)
    return rows
