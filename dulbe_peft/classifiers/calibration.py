"""Calibrated probabilities and the thresholds that follow from them: a temperature T, fitted on every new task.

    probabilities = softmax(logits / T)

T is fitted to scores over all seen classes, of the task's images by a classifier that has not learned them. If there
is no closed form for such scores, a copy of the classifier is trained without a fifth of each class's images. log T is
modelled as a linear function of the logarithm of the number of classes, because ridge regression and LDA need another
T for 10 classes than for 100. Newer tasks have larger weights, because their images were scored against more classes.
`bayes` chooses T together with its other settings instead, because they change the units of its scores.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from dulbe_peft.utils.records import Fraction, Record

FOLDS = 5
# Number of images that count as wrong. For ten or fewer images, a smaller number made the probabilities overconfident,
# and a larger number underconfident.
DOUBT = 1 / 3
FADING = 0.85  # weight of a task relative to the next one; chosen on held-out training images
KEPT = 32  # newest tasks that are kept; earlier ones would have a weight of less than 0.01
MOST_KEPT = 200  # numbers kept per task; if there are more images, evenly spaced quantiles are kept
LIMIT = math.log(1000.0)  # limit of the logarithm of a temperature, either way


class TaskTemperature(Record):
    """log T of one task's images, and their probabilities at that time, in ascending order and rounded down.

    `own` are the probabilities of the correct classes, and `largest` those of the predicted classes. Every class has
    the same weight, so the effective number of images, `worth`, is at most the number of images.
    """

    log_temperature: float = Field(ge=-LIMIT, le=LIMIT)
    images: int = Field(ge=1)
    worth: int = Field(ge=1)
    classes: int = Field(ge=2)
    own: tuple[Fraction, ...] = Field(max_length=MOST_KEPT)
    largest: tuple[Fraction, ...] = Field(max_length=MOST_KEPT)


class TaskNovelty(Record):
    """Statistics of the three signs of novelty over a task's images, and the novelties of these images.

    `known` and `unknown` are the means of the signs. `products`, 9 numbers, are the means of their products, after the
    midpoint of the two means is subtracted. Every class has the same weight. `novelties` are those of images as if
    they had not been learned, in ascending order. `area` is the probability that an image whose class was left out is
    more novel. If no class has several images, `novelties` is empty and `area` is None.
    """

    images: int = Field(ge=1)
    classes: int = Field(ge=1)
    known: tuple[float, ...] = Field(min_length=3, max_length=3)
    unknown: tuple[float, ...] = Field(min_length=3, max_length=3)
    products: tuple[float, ...] = Field(min_length=9, max_length=9)
    novelties: tuple[float, ...] = Field(max_length=MOST_KEPT, default=())
    area: Fraction | None = None


def temperature(tasks: Sequence[TaskTemperature], classes: int) -> float:
    """Return T for a number of classes, by the weighted least-squares line, or 1 if no task was fitted."""
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
    temperature_of: Callable[[Sequence[TaskTemperature]], float],
) -> tuple[TaskTemperature, ...]:
    """Return the records with one more task, from the scores, (n, C), of its left-out images.

    `learned` are the labels of all of the task's images.
    """
    images, classes = logits.shape
    logits, labels = logits.double().cpu(), labels.cpu()
    weights = class_shares(labels, learned.cpu())
    facts: dict[str, Any] = {"log_temperature": fit_temperature(logits, labels), "images": images, "classes": classes}
    facts["worth"] = worth(weights)
    tasks = (*tasks, TaskTemperature(**facts, own=(), largest=()))[-KEPT:]
    found = (logits / temperature_of(tasks)).softmax(dim=1)
    each = {"own": found.gather(1, labels[:, None])[:, 0], "largest": found.amax(dim=1)}
    kept = {name: tuple(evenly(x, weights).mul(1e6).floor().div(1e6).tolist()) for name, x in each.items()}
    return (*tasks[:-1], tasks[-1].model_copy(update=kept))


def class_shares(labels: Tensor, learned: Tensor) -> Tensor:
    """Return weights, (n,), float64, that give every class the same total weight.

    The smallest classes also get the weight of the classes without a left-out image.
    """
    counts = learned.bincount()
    own = labels.bincount(minlength=len(counts))
    there = own > 0
    fewest = there & (counts == counts[there].min())
    shares = 1 + fewest.double() * int(((counts > 0) & ~there).sum()) / int(fewest.sum())
    return (shares / own)[labels]


def worth(weights: Tensor) -> int:
    """Return the effective number of weighted values: how many values of equal weight are as informative."""
    return int(weights.sum() ** 2 / weights.square().sum() + 1e-9)


def evenly(values: Tensor, weights: Tensor) -> Tensor:
    """Return quantiles of weighted values, in ascending order: `worth(weights)` of them, at most `MOST_KEPT`."""
    order, number = values.argsort(), min(MOST_KEPT, worth(weights))
    ends = weights[order].cumsum(dim=0) / weights.sum()
    at = (torch.arange(number).to(ends) + 0.5) / number
    return values[order][torch.searchsorted(ends, at).clamp_max(len(values) - 1)]


def threshold(tasks: Sequence[TaskTemperature], kind: Literal["own", "largest"], share: float) -> float:
    """Return the threshold below which the probability of a further image falls with at most the probability `share`.

    The floor((n + 1) share)-th smallest of n probabilities has this property, however they are distributed, if the
    further image and the n are exchangeable. They are nearly so for an image like those of the newest tasks: the
    classifier has learned the n images since, and T and other settings were chosen on them. Only as many tasks are
    used as the share needs, because images of older tasks were scored against fewer classes.

    Reference:
        Vovk et al., "Algorithmic Learning in a Random World", 2005; Sadinle et al., "Least Ambiguous Set-Valued
        Classifiers with Bounded Error Levels", 2019: 1 minus the probability of the correct class as the score.
    """
    # The first of `MOST_KEPT` quantiles is that of the share 1 / (2 MOST_KEPT), so it bounds no smaller share.
    parts = ((np.asarray(getattr(task, kind)), min(task.worth, 2 * MOST_KEPT - 1)) for task in tasks[::-1])
    # After a merge a task has no probabilities.
    spread = [kept[np.linspace(0, len(kept) - 1, images).astype(int)] for kept, images in parts if len(kept)]
    return order_statistic(spread, share)


HARDLY = 0.6  # area under the ROC curve below which unknown classes can hardly be recognised


def order_statistic(parts: Sequence[np.ndarray], share: float) -> float:
    """Return the floor((n + 1) share)-th smallest value of the first parts that have enough values."""
    needed, values = math.ceil(round(1 / share, 6)) - 1, np.zeros(0)
    for part in parts:
        if len(values) < needed:
            values = np.append(values, part)
    if len(values) < needed:
        raise ValueError(
            f"a share of {share:g} takes {needed} images that were left out of learning, and there are {len(values)}: "
            "ask for a larger share of errors, or learn more images, at least two per class; merging discards scores, "
            "and a task counts for a few hundred images at most"
        )
    return float(np.sort(values)[math.floor(round((len(values) + 1) * share, 6)) - 1])


def ranking(images: Tensor) -> Tensor:
    """Return the dot product of each feature with a fixed vector, (n,): a ranking that no order of images changes."""
    fixed = torch.arange(1, images.shape[1] + 1, dtype=torch.float64).sin().to(images)
    # A matrix product may round a row differently at another position; a sum over the row does not.
    return (images * fixed).sum(dim=1)


def hold_back(images: Tensor, labels: Tensor) -> Tensor:
    """Return a mask, (n,), of the images, (n, d), to hold out: one of every five of each class, by rank."""
    order = ranking(images).argsort(stable=True)
    places = torch.empty_like(labels)
    places[order] = places_among(labels[order])
    return torch.where(labels.bincount()[labels] >= FOLDS, places % FOLDS == FOLDS // 2, places == 1)


def places_among(labels: Tensor) -> Tensor:
    """Count, for each label, the earlier labels that are equal to it, (n,)."""
    ordered, order = labels.sort(stable=True)
    places = torch.arange(len(labels)).to(order) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, places)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the log T, within the limits, that minimises the negative log-likelihood of held-out logits, (n, C).

    The loss is convex in 1/T, so its derivative has one root. As in Platt's method, each label is smoothed: `DOUBT` of
    n + 2 images counts as belonging to the strongest other class. Otherwise T would go to 0 if all held-out images
    were classified correctly.

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
