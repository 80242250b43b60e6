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
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dulbe_peft.utils.checks import is_number

FOLDS = 5
# Images that count as wrong: fewer made the probabilities of ten or fewer images too sure, more too unsure.
DOUBT = 1 / 3
BISECTIONS = 60
QUANTILES = 21
LIMIT = math.log(1000.0)  # of the logarithm of a temperature, either way


@dataclass(frozen=True)
class TaskTemperature:
    """The temperature that fits one task's held-back images.

    Args:
        log_temperature: log T.
        images: number of held-back images.
        classes: number of classes that the scores were over.
        confidences: 21 quantiles, from the least to the largest, of the held-back images' largest probabilities;
            empty where an earlier version fitted the temperature.
    """

    log_temperature: float
    images: int
    classes: int
    confidences: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, value, kinds, least, most in (
            ("log_temperature", self.log_temperature, (int, float), -LIMIT, LIMIT),
            ("images", self.images, int, 1, math.inf),
            ("classes", self.classes, int, 2, math.inf),
        ):
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ValueError(f"{name} of a calibration must be a number from {least} to {most}, got {value!r}")
        shares = self.confidences
        if shares and not (
            len(shares) == QUANTILES
            and all(isinstance(share, float) and 0 <= share <= 1 for share in shares)
            and list(shares) == sorted(shares)
        ):
            raise ValueError(f"confidences of a calibration must be {QUANTILES} rising fractions, got {shares!r:.100}")


def temperature(tasks: Sequence[TaskTemperature], classes: int) -> float:
    """T for a number of classes: exp of the weighted least-squares line of log T over the logarithm of the classes.

    Args:
        tasks: what was fitted; each task weighs as many as it has held-back images. None: T is 1.
        classes: number of seen classes.

    >>> tasks = [TaskTemperature(0.0, 20, 10), TaskTemperature(1.0, 20, 100)]
    >>> round(math.log(temperature(tasks, 10)), 3), round(math.log(temperature(tasks, 100)), 3)
    (0.0, 1.0)
    """
    if not tasks or not classes:
        return 1.0
    line = _line(tasks, [task.log_temperature for task in tasks], classes)
    return math.exp(min(LIMIT, max(-LIMIT, line)))


def rejection_threshold(tasks: Sequence[TaskTemperature], share: float, classes: int) -> float:
    """The probability that the given share of held-back images stays below.

    With more classes, largest probabilities are smaller. So the log-odds of every task's own threshold are taken to
    be a line over the logarithm of the number of classes, as in `temperature`.

    Args:
        tasks: what was fitted; each task weighs as many as it has held-back images.
        share: in (0, 1).
        classes: number of seen classes.

    Raises:
        ValueError: no image was held back, or the share is no such number.

    >>> task = TaskTemperature(0.0, 40, 10, tuple(step / 20 for step in range(21)))
    >>> round(rejection_threshold([task], 0.1, 10), 3)
    0.1
    """
    if not is_number(share) or not 0 < share < 1:
        raise ValueError(f"reject must be a share of known images between 0 and 1, such as 0.05, got {share!r}")
    told = [task for task in tasks if task.confidences]
    if not told:
        raise ValueError(
            "the classifier has held back no image, so there is no score below which an image is unknown: classes "
            "need two images or more, and files of version 0.1 have no such scores"
        )
    odds = []
    for task in told:
        place = share * (QUANTILES - 1)
        left = min(int(place), QUANTILES - 2)
        low, high = task.confidences[left : left + 2]
        value = min(1 - 1e-6, max(1e-6, low + (place - left) * (high - low)))
        odds.append(math.log(value / (1 - value)))
    return 1 / (1 + math.exp(-_line(told, odds, classes)))


def _line(tasks: Sequence[TaskTemperature], values: Sequence[float], classes: int) -> float:
    """The weighted least-squares line of the tasks' values over the logarithm of their classes, at `classes`."""
    total = sum(task.images for task in tasks)
    centre = sum(task.images * math.log(task.classes) for task in tasks) / total
    mean = sum(task.images * value for task, value in zip(tasks, values, strict=True)) / total
    across = sum(t.images * (math.log(t.classes) - centre) * (v - mean) for t, v in zip(tasks, values, strict=True))
    spread = sum(task.images * (math.log(task.classes) - centre) ** 2 for task in tasks)
    slope = across / spread if spread > 1e-6 * total else 0.0
    return mean + slope * (math.log(classes) - centre)


def write_temperatures(tasks: Sequence[TaskTemperature]) -> list[dict[str, Any]]:
    """The tasks' temperatures as JSON can hold them."""
    return [asdict(task) for task in tasks]


def read_temperatures(saved: Any) -> tuple[TaskTemperature, ...]:
    """What `write_temperatures` gave; None, as older files hold, is no task."""
    if saved is None:
        return ()
    needed = {"log_temperature", "images", "classes"}  # version 0.1 had no confidences
    if not isinstance(saved, list) or not all(
        isinstance(task, dict)
        and needed <= set(task) <= needed | {"confidences"}
        and isinstance(task.get("confidences", []), (list, tuple))
        for task in saved
    ):
        raise ValueError(
            f"calibration must be a list with {', '.join(sorted(needed))} for each task, got {saved!r:.100}"
        )
    return tuple(TaskTemperature(**task | {"confidences": tuple(task.get("confidences", ()))}) for task in saved)


def fit_task(logits: torch.Tensor, labels: torch.Tensor) -> TaskTemperature:
    """The temperature of a task's held-back images, and how sure the classifier is of them with it.

    Args:
        logits: (n, C), of held-back images, n at least 1, C at least 2.
        labels: (n,), integers, columns of `logits`.
    """
    fitted = fit_temperature(logits, labels)
    largest = (logits.double().cpu() * math.exp(-fitted)).softmax(dim=1).amax(dim=1)
    steps = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    confidences = tuple(round(value, 6) for value in largest.quantile(steps).clamp(0, 1).tolist())
    return TaskTemperature(fitted, len(logits), logits.shape[1], confidences)


def ranking(images: torch.Tensor) -> torch.Tensor:
    """The dot product of each image's feature with a fixed vector, (n,): a ranking in whatever order they come."""
    fixed = torch.arange(1, images.shape[1] + 1, dtype=torch.float64).sin().to(images)
    # A product with a matrix may round a row differently at another place in it; a sum over the row does not.
    return (images * fixed).sum(dim=1)


def hold_back(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which images to keep out of learning: about a fifth of each class, none of a class with a single image.

    A class's images are ranked by their dot product with a fixed vector, and one of every five is taken. So the
    choice does not depend on the order of the images.

    Args:
        images: (n, d), unit features.
        labels: (n,), integers.

    Returns:
        (n,), booleans.
    """
    held = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
    ranks = ranking(images)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        ranked = rows[ranks[rows].argsort()]
        held[ranked[FOLDS // 2 :: FOLDS] if len(rows) >= FOLDS else ranked[1:2]] = True
    return held


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """log T with the least negative log-likelihood of held-back images, between the limits.

    The loss is convex in 1/T, so its derivative is bisected, in float64. `DOUBT` of n + 2 images counts as of its
    strongest rival class, much as in Platt's method; else T would go to 0 wherever every held-back image is right.

    Args:
        logits: (n, C), of held-back images, n at least 1, C at least 2.
        labels: (n,), integers, columns of `logits`.

    Reference:
        Guo et al., "On Calibration of Modern Neural Networks", 2017, section 4.2; Platt, "Probabilistic Outputs for
        Support Vector Machines", 1999, section 2.2.
    """
    if logits.device.type == "mps":  # which has no float64
        logits, labels = logits.cpu(), labels.cpu()
    logits = logits.double()
    own = logits.gather(1, labels[:, None])
    rival = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1, keepdim=True)
    doubt = DOUBT / (len(logits) + 2)
    logits = logits - (1 - doubt) * own - doubt * rival
    low, high = -LIMIT, LIMIT
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        slope = ((logits * math.exp(-middle)).softmax(dim=1) * logits).sum()
        low, high = (low, middle) if slope < 0 else (middle, high)
    return (low + high) / 2
