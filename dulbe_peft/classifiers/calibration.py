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

# Number of images that count as wrong. For ten or fewer images, a smaller number made the probabilities overconfident,
# and a larger number underconfident.
DOUBT = 1 / 3
FADING = 0.85  # weight of a task relative to the next one; chosen on held-out training images
KEPT = 32  # newest tasks that are kept; earlier ones would have a weight of less than 0.01
MOST_KEPT = 200  # numbers kept per task; if there are more images, evenly spaced quantiles are kept
LIMIT = math.log(1000.0)  # limit of the logarithm of a temperature, either way
WRONG = tuple(0.9 * (step / 30) ** 2 for step in range(31))  # shares of wrong labels whose likelihoods are compared
STEP, STEPS = math.log(2) / 2, 14  # of the smaller temperatures that are compared if labels are wrong
WITHIN = 1.92  # difference of log-likelihoods: half the 95 % quantile of chi-squared with one degree of freedom


class TaskTemperature(Record):
    """log T of one task's images, and their probabilities at that time, in ascending order and rounded down.

    `own` are the probabilities of the correct classes, and `largest` those of the predicted classes. Every class has
    the same weight, so the effective number of images, `worth`, is at most the number of images. `judged` is
    the number of classes of the images, and `wrong` are the log-likelihoods of the shares of wrong labels in `WRONG`.
    """

    log_temperature: float = Field(ge=-LIMIT, le=LIMIT)
    images: int = Field(ge=1)
    worth: int = Field(ge=1)
    classes: int = Field(ge=2)
    judged: int = Field(ge=0, default=0)
    wrong: tuple[float, ...] = Field(max_length=len(WRONG), default=())
    own: tuple[Fraction, ...] = Field(max_length=MOST_KEPT)
    largest: tuple[Fraction, ...] = Field(max_length=MOST_KEPT)


class TaskNovelty(Record):
    """Statistics of the three signs of novelty over a task's images, and the novelties of these images.

    `known` and `unknown` are the means of the signs. `products`, 9 numbers, are the means of their products, after the
    midpoint of the two means is subtracted. Every class has the same weight. `novelties` are those of images as if
    they had not been learned, in ascending order. `area` is the probability that an image whose class was left out is
    more novel, `between` the sum of the squares by which it differs for each class, see `novelty.area_by_classes`, and
    `unfamiliar` are the novelties of the images whose class was left out. If no class has several images, `novelties`
    and `unfamiliar` are empty, and `area` and `between` are None.
    """

    images: int = Field(ge=1)
    classes: int = Field(ge=1)
    known: tuple[float, ...] = Field(min_length=3, max_length=3)
    unknown: tuple[float, ...] = Field(min_length=3, max_length=3)
    products: tuple[float, ...] = Field(min_length=9, max_length=9)
    novelties: tuple[float, ...] = Field(max_length=MOST_KEPT, default=())
    area: Fraction | None = None
    between: float | None = Field(ge=0, default=None)
    unfamiliar: tuple[float, ...] = Field(max_length=MOST_KEPT, default=())


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
    groups: Tensor | None = None,
    few: bool = False,
) -> tuple[TaskTemperature, ...]:
    """Return the records with one more task, from the scores, (n, C), of its left-out images.

    `learned` are the labels of all of the task's images. Images of the same of `groups`, (n,), count as one. `few` is
    whether the task has too few items to tell wrong labels, see `few_items`.
    """
    images, classes = logits.shape
    logits, labels = logits.double().cpu(), labels.cpu()
    weights = class_shares(labels, learned.cpu())
    best, wrong = fit_temperature(logits, labels, tasks, groups, few)
    facts: dict[str, Any] = {"log_temperature": best, "images": images, "classes": classes}
    facts["judged"] = len(labels.unique())
    facts["wrong"] = tuple(round(float(each), 3) for each in wrong - wrong.max())
    facts["worth"] = worth(weights, groups)
    tasks = (*tasks, TaskTemperature(**facts, own=(), largest=()))[-KEPT:]
    found = (logits / temperature_of(tasks)).softmax(dim=1)
    each = {"own": found.gather(1, labels[:, None])[:, 0], "largest": found.amax(dim=1)}
    kept = {name: tuple(evenly(x, weights, groups).mul(1e6).floor().div(1e6).tolist()) for name, x in each.items()}
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


def worth(weights: Tensor, groups: Tensor | None = None) -> int:
    """Return the effective number of weighted values: how many values of equal weight are as informative.

    Values of one group count as one value.
    """
    if groups is not None:
        weights = torch.zeros(int(groups.max()) + 1).to(weights).index_add(0, groups.to(weights.device), weights)
    return int(weights.sum() ** 2 / weights.square().sum() + 1e-9)


def evenly(values: Tensor, weights: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return quantiles of weighted values in ascending order: `worth(weights, groups)`, at most `MOST_KEPT`."""
    order, number = values.argsort(), min(MOST_KEPT, worth(weights, groups))
    ends = weights[order].cumsum(dim=0) / weights.sum()
    at = (torch.arange(number).to(ends) + 0.5) / number
    return values[order][torch.searchsorted(ends, at).clamp_max(len(values) - 1)]


def threshold(tasks: Sequence[TaskTemperature], kind: Literal["own", "largest"], share: float) -> float:
    """Return the threshold below which the probability of a further image falls with at most the probability `share`.

    The floor((n + 1) share)-th smallest of n probabilities has this property, however they are distributed, if the
    further image and the n are exchangeable. They are nearly so for an image like those of the newest tasks: the
    classifier has learned the n images since, and T and other settings were chosen on them. Only as many tasks are
    used as the share needs, because images of older tasks were scored against fewer classes.

    If some labels of the n images are wrong, the guarantee is meant for the correct class of a further image. A share
    w of the n probabilities then belongs to wrong labels, and nearly all of these are the smallest ones. The lower end
    of the interval of w is used, so that the threshold is rather too low than too high.

    Reference:
        Vovk et al., "Algorithmic Learning in a Random World", 2005; Sadinle et al., "Least Ambiguous Set-Valued
        Classifiers with Bounded Error Levels", 2019: 1 minus the probability of the correct class as the score.
    """
    if kind == "own" and (wrong := share_of_wrong_labels(tasks)) is not None:
        share += wrong[1] * (1 - share)
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


def log_likelihoods(own: Tensor, classes: int, wrong: Sequence[float]) -> Tensor:
    """Return the log-likelihood of labels, (..., len(wrong)), if a share w of the labels of C classes is wrong.

        p(y | x, w) = (1 - w) p(y | x) + w (1 - p(y | x)) / (C - 1)

    The class of a wrong label is random, each other class with the same probability. With w = 0, one label that
    contradicts a certain answer costs more than a hundred others gain, so that a few wrong labels would make every
    answer unsure. `own` are the log p(y | x), (...). A larger w counts as (C - 1) / C, where labels tell nothing.

    Reference:
        Lawrence and Schoelkopf, "Estimating a Kernel Fisher Discriminant in the Presence of Label Noise", ICML 2001.
    """
    shares = (torch.tensor(wrong, dtype=own.dtype, device=own.device) * classes / (classes - 1)).clamp_max(1)
    mixed = ((1 - shares) * own.exp()[..., None] + shares / classes).log()
    return torch.where(shares > 0, mixed, own[..., None])


def penalties(wrong: Sequence[float], number: float) -> Tensor:
    """Return minus the logarithm of the prior of each share w of wrong labels, (len(wrong),), for n images.

    It is -log(1 - w), and for w > 0 also log(n) / 2, by Schwarz's criterion: without evidence, all labels are right.
    """
    shares = torch.tensor(wrong, dtype=torch.float64)
    return (shares > 0) * math.log(max(1.0, number)) / 2 - (1 - shares).log()


def fit_temperature(
    logits: Tensor,
    labels: Tensor,
    earlier: Sequence[TaskTemperature] = (),
    groups: Tensor | None = None,
    few: bool = False,
) -> tuple[float, Tensor]:
    """Fit the temperature T and the share w of wrong labels to held-out logits, (n, C), with labels (n,).

    They maximise the sum of `log_likelihoods` less `penalties`. Tasks have the same w, so the log-likelihoods of
    `earlier` tasks are added. All images of the same of `groups`, (n,), count as one, and `few` items say nothing
    about w. As in Platt's method, each label is smoothed: `DOUBT` of n + 2 images counts as belonging to the strongest
    other class. Otherwise T would go to 0 if all held-out images were classified correctly. The doubt is a prior of T
    and no label, so w does not apply.

    With w = 0 the loss is convex in 1/T, so its derivative has one root. With a larger w, the best T is smaller.

    Returns:
        log T, within the limits, and the log-likelihood of each w of `WRONG` at its best T, (len(WRONG),).

    Reference:
        Guo et al., "On Calibration of Modern Neural Networks", 2017, section 4.2; Platt, 1999, section 2.2.
    """
    from scipy.optimize import brentq, minimize_scalar

    logits, labels = logits.cpu().double(), labels.cpu()[:, None]
    logits = logits - logits.gather(1, labels)
    rival = logits.scatter(1, labels, -torch.inf).amax(dim=1)
    sizes = torch.ones(len(logits)) if groups is None else groups.cpu().bincount()[groups.cpu()]
    weights = 1 / sizes.double()
    number, classes = round(float(weights.sum())), logits.shape[1]
    doubt = DOUBT / (number + 2)
    smoothed = logits - doubt * rival[:, None]

    def slope(log_temperature: float) -> float:
        return float(weights @ ((smoothed * math.exp(-log_temperature)).softmax(dim=1) * smoothed).sum(dim=1))

    known = len(WRONG) * (0.0,) if few else WRONG  # then all shares are as likely

    def likelihoods(log_temperature: float, wrong: Sequence[float] = known) -> Tensor:
        factor = math.exp(-log_temperature)
        own = -(logits * factor).logsumexp(dim=1)
        told = log_likelihoods(own, classes, wrong)
        return weights @ ((1 - doubt) * told + doubt * (own + rival * factor)[:, None])

    plain = LIMIT if slope(LIMIT) >= 0 else -LIMIT if slope(-LIMIT) <= 0 else float(brentq(slope, -LIMIT, LIMIT))
    grid = [min(LIMIT, max(-LIMIT, plain - STEP * step)) for step in range(-1, STEPS)]
    table = torch.stack([*map(likelihoods, grid)])
    records = [task for task in earlier if task.wrong]
    told = table - penalties(WRONG, number + sum(task.worth for task in records))
    told += torch.tensor([task.wrong for task in records], dtype=torch.float64).reshape(-1, len(WRONG)).sum(dim=0)
    place, number = divmod(int(told.argmax()), len(WRONG))
    if number == 0:
        return plain, peaks(table)
    ends = grid[min(STEPS, place + 1)], grid[max(0, place - 1)]
    wrong = WRONG[number]
    found = minimize_scalar(lambda t: -float(likelihoods(t, [wrong])), bounds=ends, method="bounded")
    return float(found.x), peaks(table)


def peaks(table: Tensor) -> Tensor:
    """Return the maximum of each column, (n,), of a table, (m, n), by a parabola if it is inside the column."""
    largest, at = table.max(dim=0)
    before, here, after = (table.gather(0, (at + step).clamp(0, len(table) - 1)[None])[0] for step in (-1, 0, 1))
    bend = 2 * here - before - after
    inside = (at > 0) & (at < len(table) - 1) & (bend > 0)
    return largest + torch.where(inside, (after - before).square() / (8 * bend), 0.0)


def share_of_wrong_labels(tasks: Sequence[TaskTemperature]) -> tuple[float, float, float] | None:
    """Return w and the ends of its 95 % interval from the left-out images of all tasks, or None without any.

    They are those of `interval_of_wrong` for the sum of the tasks' log-likelihoods.
    """
    told = [task.wrong for task in tasks if task.wrong]
    return interval_of_wrong(np.sum(told, axis=0)) if told else None


def interval_of_wrong(likelihoods: np.ndarray) -> tuple[float, float, float]:
    """Return w and the ends of its 95 % interval from the log-likelihood of each share of `WRONG`.

    w maximises the log-likelihood plus log(1 - w). The interval contains each w for which this is less than `WITHIN`
    below that of the best one (Wilks, 1938).
    """
    from scipy.interpolate import PchipInterpolator

    fine = np.linspace(0, math.sqrt(WRONG[-1]), 2001) ** 2
    values = PchipInterpolator(np.sqrt(WRONG), likelihoods)(np.sqrt(fine)) + np.log1p(-fine)
    inside = fine[values >= values.max() - WITHIN]
    return float(fine[values.argmax()]), float(inside.min()), float(inside.max())
