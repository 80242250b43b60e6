"""Probabilities that mean what they say: a temperature, fitted on held-back images of each new task.

    probabilities = softmax(logits / T)

A task's held-back images are a fifth of each of its classes' images. A copy of the classifier learns without them, a
temperature is fitted on them, over all seen classes, and the classifier then learns from all images. No image of an
earlier task is needed. T follows the tasks' temperatures: their logarithm is taken to be a line over the logarithm of
the number of classes, because ridge regression and LDA need another T for 10 classes than for 100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import Field
from scipy.optimize import brentq
from torch import Tensor

from dulbe_peft.utils.checks import is_number
from dulbe_peft.utils.records import Fraction, Record

FOLDS = 5
# Images that count as wrong: fewer made the probabilities of ten or fewer images too sure, more too unsure.
DOUBT = 1 / 3
QUANTILES = 21
LIMIT = math.log(1000.0)  # of the logarithm of a temperature, either way


class TaskTemperature(Record):
    """log T of one task's held-back images, and 21 quantiles of their largest probabilities, the least first."""

    log_temperature: float = Field(ge=-LIMIT, le=LIMIT)
    images: int = Field(ge=1)
    classes: int = Field(ge=2)
    confidences: tuple[Fraction, ...] = Field(min_length=QUANTILES, max_length=QUANTILES)


def temperature(tasks: Sequence[TaskTemperature], classes: int) -> float:
    """T for a number of classes; 1 where no task was fitted."""
    if not tasks or not classes:
        return 1.0
    return math.exp(min(LIMIT, max(-LIMIT, _line(tasks, [task.log_temperature for task in tasks], classes))))


def rejection_threshold(tasks: Sequence[TaskTemperature], share: float, classes: int) -> float:
    """The probability that the given share of held-back images stays below.

    Largest probabilities fall with more classes, so the tasks' log-odds are taken to be a line as in `temperature`.
    """
    if not is_number(share) or not 0 < share < 1:
        raise ValueError(f"reject must be a share of known images between 0 and 1, such as 0.05, got {share!r}")
    if not tasks:
        raise ValueError("the classifier has held back no image to find a threshold: classes need two images or more")
    odds = []
    for task in tasks:
        quantiles = torch.tensor(task.confidences, dtype=torch.float64)
        # The quantiles are evenly spaced, so their own quantile interpolates between two of them.
        value = min(1 - 1e-6, max(1e-6, float(quantiles.quantile(share))))
        odds.append(math.log(value / (1 - value)))
    return 1 / (1 + math.exp(-_line(tasks, odds, classes)))


def _line(tasks: Sequence[TaskTemperature], values: Sequence[float], classes: int) -> float:
    """The weighted least-squares line of the tasks' values over the logarithm of their classes, at `classes`."""
    total = sum(task.images for task in tasks)
    centre = sum(task.images * math.log(task.classes) for task in tasks) / total
    mean = sum(task.images * value for task, value in zip(tasks, values, strict=True)) / total
    across = sum(t.images * (math.log(t.classes) - centre) * (v - mean) for t, v in zip(tasks, values, strict=True))
    spread = sum(task.images * (math.log(task.classes) - centre) ** 2 for task in tasks)
    slope = across / spread if spread > 1e-6 * total else 0.0
    return mean + slope * (math.log(classes) - centre)


def fit_task(logits: Tensor, labels: Tensor) -> TaskTemperature:
    """The temperature of a task's held-back images, (n, C) logits, and how sure the classifier is of them with it."""
    fitted = fit_temperature(logits, labels)
    largest = (logits.double().cpu() * math.exp(-fitted)).softmax(dim=1).amax(dim=1)
    steps = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    confidences = tuple(round(value, 6) for value in largest.quantile(steps).clamp(0, 1).tolist())
    return TaskTemperature(
        log_temperature=fitted, images=len(logits), classes=logits.shape[1], confidences=confidences
    )


def ranking(images: Tensor) -> Tensor:
    """The dot product of each image's feature with a fixed vector, (n,): a ranking in whatever order they come."""
    fixed = torch.arange(1, images.shape[1] + 1, dtype=torch.float64).sin().to(images)
    # A product with a matrix may round a row differently at another place in it; a sum over the row does not.
    return (images * fixed).sum(dim=1)


def hold_back(images: Tensor, labels: Tensor) -> Tensor:
    """Which of the (n, d) images to keep out of learning, (n,) booleans: about a fifth of each class.

    One of every five in the order of `ranking` is taken, so the order of the images does not matter.
    """
    held = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    ranks = ranking(images)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        ranked = rows[ranks[rows].argsort()]
        held[ranked[FOLDS // 2 :: FOLDS] if len(rows) >= FOLDS else ranked[1:2]] = True
    return held


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
    return -LIMIT if slope(-LIMIT) <= 0 else float(brentq(slope, -LIMIT, LIMIT))
