"""Probabilities that mean what they say, and what may be promised by them: a temperature, fitted on every new task.

    probabilities = softmax(logits / T)

It is fitted on scores of the task's images by a classifier that has not learned them, over all seen classes. Where
there is no closed form of such scores, a copy of the classifier learns without a fifth of each class's images. The
logarithm of T is taken to be a line over that of the number of classes, because ridge regression and LDA need another
T for 10 classes than for 100. The newest tasks weigh most, because their images have met most classes.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dulbe_peft.utils.records import Fraction, Record

FOLDS = 5
# Images that count as wrong: fewer made the probabilities of ten or fewer images too sure, more too unsure.
DOUBT = 1 / 3
FADING = 0.85  # the weight of a task beside the next one's; chosen on held-back training images
KEPT = 32  # tasks; those before weigh less than a hundredth
MOST = 200  # numbers kept of a task; of more images, these are spread evenly over their ranks
LIMIT = math.log(1000.0)  # of the logarithm of a temperature, either way


class TaskTemperature(Record):
    """log T of one task's images, and their probabilities of that time, the least first and rounded down.

    `own` are of their own classes, `largest` of the classes that they were taken for; each class weighs alike, so that
    they are `worth` fewer images than there are.
    """

    log_temperature: float = Field(ge=-LIMIT, le=LIMIT)
    images: int = Field(ge=1)
    worth: int = Field(ge=1)
    classes: int = Field(ge=2)
    own: tuple[Fraction, ...] = Field(max_length=MOST)
    largest: tuple[Fraction, ...] = Field(max_length=MOST)


class TaskNovelty(Record):
    """What the images of a task say of the three signs, and how novel they are.

    `known` and `unknown` are the signs' means, and `products`, 9 numbers, their mean products about the middle of
    these, each class alike. `novelties` are of the images as if they had not been learned, the least first; `area` is
    the chance that an image whose class was left out is more novel. Without classes of several images there are none.
    """

    images: int = Field(ge=1)
    classes: int = Field(ge=1)
    known: tuple[float, ...] = Field(min_length=3, max_length=3)
    unknown: tuple[float, ...] = Field(min_length=3, max_length=3)
    products: tuple[float, ...] = Field(min_length=9, max_length=9)
    novelties: tuple[float, ...] = Field(max_length=MOST, default=())
    area: Fraction | None = None


def temperature(tasks: Sequence[TaskTemperature], classes: int) -> float:
    """T for a number of classes, by the weighted least-squares line; 1 where no task was fitted."""
    if not tasks or not classes:
        return 1.0
    fades = FADING ** np.arange(len(tasks))[::-1]
    weights = fades * [task.images for task in tasks]
    across = np.log([task.classes for task in tasks])
    values = np.array([task.log_temperature for task in tasks])
    centre, mean = np.average(across, weights=weights), np.average(values, weights=weights)
    spread = weights @ (across - centre) ** 2
    slope = weights @ ((across - centre) * (values - mean)) / spread if spread > 1e-6 * weights.sum() else 0.0
    return math.exp(min(LIMIT, max(-LIMIT, mean + slope * (math.log(classes) - centre))))


def calibrated(
    tasks: Sequence[TaskTemperature],
    logits: Tensor,
    labels: Tensor,
    learned: Tensor,
) -> tuple[TaskTemperature, ...]:
    """With one more task, from (n, C) scores of its left-out images; `learned` are the labels of all its images."""
    images, classes = logits.shape
    logits, labels = logits.double().cpu(), labels.cpu()
    weights = class_shares(labels, learned.cpu())
    facts: dict[str, Any] = {"log_temperature": fit_temperature(logits, labels), "images": images, "classes": classes}
    facts["worth"] = worth(weights)
    tasks = (*tasks, TaskTemperature(**facts, own=(), largest=()))[-KEPT:]
    found = (logits / temperature(tasks, classes)).softmax(dim=1)
    each = {"own": found.gather(1, labels[:, None])[:, 0], "largest": found.amax(dim=1)}
    kept = {name: tuple(evenly(x, weights).mul(1e6).floor().div(1e6).tolist()) for name, x in each.items()}
    return (*tasks[:-1], tasks[-1].model_copy(update=kept))


def class_shares(labels: Tensor, learned: Tensor) -> Tensor:
    """Weights, (n,), float64, with which classes weigh alike; the smallest stand for those with no left-out image."""
    counts = learned.bincount()
    own = labels.bincount(minlength=len(counts))
    there = own > 0
    fewest = there & (counts == counts[there].min())
    shares = 1 + fewest.double() * int(((counts > 0) & ~there).sum()) / int(fewest.sum())
    return (shares / own)[labels]


def worth(weights: Tensor) -> int:
    """How many values of equal weight weighted ones are worth."""
    return int(weights.sum() ** 2 / weights.square().sum() + 1e-9)


def evenly(values: Tensor, weights: Tensor) -> Tensor:
    """Quantiles of weighted values, the least first: as many as they are worth, at most `MOST`."""
    order, number = values.argsort(), min(MOST, worth(weights))
    ends = weights[order].cumsum(dim=0) / weights.sum()
    at = (torch.arange(number).to(ends) + 0.5) / number
    return values[order][torch.searchsorted(ends, at).clamp_max(len(values) - 1)]


def threshold(tasks: Sequence[TaskTemperature], kind: Literal["own", "largest"], share: float) -> float:
    """The probability below which a further image is with at most this chance, if it is of the newest tasks' kind.

    Of n images, the floor((n + 1) share)-th smallest has this property, whatever the probabilities are. No more tasks
    are taken than the share needs, because images of older ones have met fewer classes.

    Reference:
        Vovk et al., "Algorithmic Learning in a Random World", 2005; Sadinle et al., "Least Ambiguous Set-Valued
        Classifiers with Bounded Error Levels", 2019: 1 less the probability of the own class as the score.
    """
    parts = ((np.asarray(getattr(task, kind)), task.worth) for task in tasks[::-1])
    # None are left after a merge.
    spread = [kept[np.linspace(0, len(kept) - 1, images).astype(int)] for kept, images in parts if len(kept)]
    return order_statistic(spread, share)


HARDLY = 0.6  # an area under the ROC curve below which unknown classes cannot be told


def order_statistic(parts: Sequence[np.ndarray], share: float) -> float:
    """The floor((n + 1) share)-th smallest of the first parts that suffice."""
    needed, values = math.ceil(round(1 / share, 6)) - 1, np.zeros(0)
    for part in parts:
        if len(values) < needed:
            values = np.append(values, part)
    if len(values) < needed:
        raise ValueError(
            f"a share of {share:g} takes {needed} images that the scores did not learn, and there are {len(values)}: "
            "ask for a larger share of errors, or teach more images, of each class two at least; merging begins anew"
        )
    return float(np.sort(values)[math.floor(round((len(values) + 1) * share, 6)) - 1])


def ranking(images: Tensor) -> Tensor:
    """The dot product of each image's feature with a fixed vector, (n,): a ranking in whatever order they come."""
    fixed = torch.arange(1, images.shape[1] + 1, dtype=torch.float64).sin().to(images)
    # A product with a matrix may round a row differently at another place in it; a sum over the row does not.
    return (images * fixed).sum(dim=1)


def hold_back(images: Tensor, labels: Tensor) -> Tensor:
    """Which of the (n, d) images to keep out of learning, (n,) booleans: of each class, one of every five by rank."""
    order = ranking(images).argsort(stable=True)
    places = torch.empty_like(labels)
    places[order] = places_among(labels[order])
    return torch.where(labels.bincount()[labels] >= FOLDS, places % FOLDS == FOLDS // 2, places == 1)


def places_among(labels: Tensor) -> Tensor:
    """How many of the labels before each one are equal to it, (n,)."""
    ordered, order = labels.sort(stable=True)
    places = torch.arange(len(labels)).to(order) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, places)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """log T with the least negative log-likelihood of held-back images, (n, C) logits, between the limits.

    The loss is convex in 1/T, so its derivative has one root. `DOUBT` of n + 2 images counts as of its strongest rival
    class, much as in Platt's method; else T would go to 0 wherever every held-back image is right.

    Reference:
        Guo et al., "On Calibration of Modern Neural Networks", 2017, section 4.2; Platt, 1999, section 2.2.
    """
    logits, labels = logits.cpu().double(), labels.cpu()
    own = logits.gather(1, labels[:, None])
    rival = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1, keepdim=True)
    doubt = DOUBT / (len(logits) + 2)
    logits = logits - (1 - doubt) * own - doubt * rival

    def slope(log_temperature: float) -> float:
        return float(((logits * math.exp(-log_temperature)).softmax(dim=1) * logits).sum())

    if slope(LIMIT) >= 0:
        return LIMIT
    from scipy.optimize import brentq

    return -LIMIT if slope(-LIMIT) <= 0 else float(brentq(slope, -LIMIT, LIMIT))
