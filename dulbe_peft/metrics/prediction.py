"""The answers of a classifier for images that nobody has labelled."""

from dataclasses import dataclass
from typing import Any

import torch

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.utils.settings import check_int


@dataclass(frozen=True)
class Prediction:
    """The answer for one image: its `classes`, the most likely one first, and their calibrated `probabilities`."""

    image: str
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    known: bool = True  # False: it is too unlike all that was learned
    novelty: float | None = None  # how unlike that it is, where it was asked for
    error: str | None = None  # why the image cannot be read

    def answer(self, number: int, scores: bool, several: Any) -> Any:
        """The best class, or all of them where `several` is true, as (name, probability) where `scores` are asked."""
        if self.error is not None:
            raise ValueError(f"image {number} ({self.image}) cannot be read: {self.error}")
        found = list(zip(self.classes, self.probabilities, strict=True)) if scores else list(self.classes)
        found = found if self.known else []
        return found if several else next(iter(found), None)


@torch.no_grad()
def predict_images(
    encoder: Encoder,
    classifier: Classifier,
    images: LabelledImages,
    top_k: int = 1,
    reject: float | None = None,
    coverage: float | None = None,
    novelty: bool = False,
) -> list[Prediction]:
    """The `top_k` most likely classes of every image, or its set by `prediction_sets`; the rest as in `predict`."""
    count = min(check_int("top_k", top_k, 1), len(classifier.class_names))
    if not len(images):
        return []
    features, unreadable = encoder.readable_embeds(encoder.images(images), "predict", passing=True)
    readable = [index for index in range(len(images)) if index not in unreadable]
    rows = [Prediction(images.item_name(index), error=unreadable.get(index)) for index in range(len(images))]
    for chunk in torch.tensor(readable, dtype=torch.long).split(4096):
        own, sizes = features[chunk.to(features.device)], [count] * len(chunk)
        refused = [False] * len(chunk) if reject is None else classifier.refused(own, reject).tolist()
        novel = classifier.novelty(own).tolist() if novelty else [None] * len(chunk)
        if coverage is not None:
            sizes = classifier.prediction_sets(own, coverage).sum(dim=1).tolist()
        best, chosen = classifier.probabilities(own).topk(max(sizes, default=1), dim=1)
        found = zip(chunk.tolist(), sizes, best.tolist(), chosen.tolist(), refused, novel, strict=True)
        for index, size, values, classes, unknown, distance in found:
            names = tuple(classifier.class_names[label] for label in classes[:size])
            rows[index] = Prediction(rows[index].image, names, tuple(values[:size]), not unknown, distance)
    return rows
