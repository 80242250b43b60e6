"""The measures of a comparison as means over seeds and images, with confidence intervals by Student's t."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import t

from dulbe_peft.metrics.task_features import Answers

Measure = Literal["last", "average", "forgetting"]  # A_last, A_bar, and the loss of earlier tasks since their best


def image_shares(answers: Sequence[Answers], class_names: Sequence[str]) -> dict[Measure, np.ndarray]:
    """Return the contribution of each test image to each measure, (n,) each, ordered by class name.

    Each measure is the mean of its contributions, so that rows can be compared image by image. For A_last, an image
    contributes right_T: 1 if it is classified correctly after the last task T, else 0. For A_bar, it contributes

        n / T * sum_t right_t / n_t        over the tasks t from the first one that knows the image's class

    where n is the number of test images after task T, and n_t after task t. For forgetting, an image of a task i that
    is not the last one contributes n / (n_i (T - 1)) * (right_b - right_T), where n_i is the number of test images of
    task i, and b is the task after which the accuracy on task i was highest.
    """
    last = answers[-1]
    total = len(last.truth)
    right = [step.right.double().numpy() for step in answers]
    average, lost = np.zeros(total), np.zeros(total)
    for step in right:  # the images of earlier tasks come first, in the same order
        average[: len(step)] += step * (total / len(step) / len(answers))
    tasks = last.task.numpy()
    earlier = [number for number in np.unique(tasks) if number < len(answers)]
    for number in earlier:
        rows = np.flatnonzero(tasks == number)
        best = max((step[rows] for step in right[:-1] if len(step) > rows[-1]), key=np.mean)
        lost[rows] = (best - right[-1][rows]) * (total / len(rows) / len(earlier))
    rank = {name: place for place, name in enumerate(sorted(class_names))}
    order = np.argsort([rank[class_names[int(index)]] for index in last.truth], kind="stable")
    return {"last": right[-1][order], "average": average[order], "forgetting": lost[order]}


def mean_share(shares: np.ndarray) -> float:
    """Return the mean of `shares`, (n,), limited to 1, because rounding errors can make it slightly larger."""
    return min(1.0, float(shares.mean()))


@dataclass(frozen=True)
class Difference:
    """A mean over seeds and images, such as the mean difference of two rows, and the ends of its interval."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low > 0 or self.high < 0


def mean_interval(values: np.ndarray) -> Difference:
    """Return the mean of `values`, (seeds, images), and its 95 % interval by Student's t, over both seeds and images.

    The variance of the mean is the variance of the seeds' means divided by the number of seeds, plus the variance of
    the images' means divided by the number of images. The degrees of freedom are those of Welch and Satterthwaite, see
    "An Approximate Distribution of Estimates of Variance Components", 1946, equation 17. With one seed, the interval
    covers only the variation between test images.
    """
    sides = (values.mean(axis=1), values.mean(axis=0))
    parts = [(means.var(ddof=1) / len(means), len(means) - 1) for means in sides if len(means) > 1]
    mean, variance = float(values.mean()), sum(part for part, _ in parts)
    half = 0.0
    if variance:
        freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
        half = float(t.ppf(0.975, freedom) * variance**0.5)
    # Differences that cancel leave rounding errors. Round, so that an interval that ends at zero includes zero.
    return Difference(mean, round(mean - half, 12) + 0.0, round(mean + half, 12) + 0.0)
