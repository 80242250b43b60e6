"""The predictions of a classifier for unlabelled images."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.arguments import Query
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import learned_name, normalized
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
    group: str | None = None  # the item or event of the image, if its answer is that of the item

    def answer(self, number: int, scores: bool, several: bool) -> Any:
        """Return the best class, or a list of all classes if `several`; with `scores`, pairs (name, probability).

        If the image is not known, return None or an empty list. `number` is the image's place, for error messages.
        """
        if self.error is not None:
            raise ValueError(f"image {number} ({self.image}) cannot be read: {self.error}")
        classes = list(zip(self.classes, self.probabilities, strict=True)) if scores else list(self.classes)
        classes = classes if self.known else []
        return classes if several else next(iter(classes), None)


class Answers:
    """What a classifier can answer: its classes, or with `only` some of them, or with `sum_up` groups of them.

    Attributes:
        names: The answers, such as groups, in the order of their first classes.

    Raises:
        ValueError: If a class in the query has not been learned.
    """

    def __init__(self, classifier: Classifier, query: Query) -> None:
        for given in ((query.only or ()), (query.sum_up or {})):
            for name in given:
                learned_name(name, classifier.class_names, "among the answers")
        only = None if query.only is None else set(map(normalized, query.only))
        groups = {normalized(name): group for name, group in (query.sum_up or {}).items()}
        possible = [name for name in classifier.class_names if only is None or name in only]
        if not possible:
            raise ValueError("only is empty, expected at least one class that is possible")
        group_of = {name: groups.get(name, name) for name in possible}
        self.classifier, self.plain = classifier, query.only is None and not query.sum_up
        self.names = tuple(dict.fromkeys(group_of.values()))
        self._labels = torch.tensor([classifier.class_names.index(name) for name in possible])
        self._places = torch.tensor([self.names.index(group_of[name]) for name in possible])

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probabilities of the answers, (n, number of answers) in float32, which sum to 1."""
        if self.plain:
            return self.classifier.probabilities(features)
        scores = self.classifier(features) / self.classifier.temperature
        shares = scores[:, self._labels.to(scores.device)].softmax(dim=1)
        return self._summed(shares)

    def set_sizes(self, features: Tensor, coverage: float) -> list[int]:
        """Return how many answers, the most probable ones, contain the classes of each prediction set.

        A set that contains the right class contains its group, and leaving out what is not possible keeps it in.
        """
        sets = self.classifier.prediction_sets(features, coverage)
        if self.plain:
            return sets.sum(dim=1).tolist()
        inside = sets[:, self._labels.to(sets.device)].float()
        order = self.probabilities(features).argsort(dim=1, descending=True)
        last = (self._summed(inside) > 0).gather(1, order) * torch.arange(1, len(self.names) + 1, device=order.device)
        return last.amax(dim=1).clamp_min(1).tolist()

    def _summed(self, values: Tensor) -> Tensor:
        """Return the sums over the classes of each answer, (n, answers), of values of the possible classes."""
        return values.new_zeros(len(values), len(self.names)).index_add_(1, self._places.to(values.device), values)


@torch.no_grad()
def predict_images(encoder: Encoder, classifier: Classifier, images: LabelledImages, query: Query) -> list[Prediction]:
    """Predict the classes of every image. An image that cannot be read has an `error`."""
    answers = Answers(classifier, query)
    count = min(query.top_k, len(answers.names))
    if not len(images):
        return []
    features, unreadable = encoder.readable_embeds(encoder.images(images), "predict", passing=True)
    readable = [index for index in range(len(images)) if index not in unreadable]
    rows = [Prediction(images.item_name(index), error=unreadable.get(index)) for index in range(len(images))]
    for chunk in torch.tensor(readable, dtype=torch.long).split(4096):
        rows_of_chunk, sizes = features[chunk.to(features.device)], [count] * len(chunk)
        refused = [False] * len(chunk)
        if query.reject is not None:
            refused = classifier.refused(rows_of_chunk, query.reject).tolist()
        novel = classifier.novelty(rows_of_chunk).tolist() if query.novelty else [None] * len(chunk)
        if query.coverage is not None:
            sizes = answers.set_sizes(rows_of_chunk, query.coverage)
        best, chosen = answers.probabilities(rows_of_chunk).topk(max(sizes, default=1), dim=1)
        results = zip(chunk.tolist(), sizes, best.tolist(), chosen.tolist(), refused, novel, strict=True)
        for index, size, values, classes, unknown, distance in results:
            names = tuple(answers.names[label] for label in classes[:size])
            rows[index] = Prediction(rows[index].image, names, tuple(values[:size]), not unknown, distance)
    return rows
