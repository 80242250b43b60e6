"""The measures of a comparison as means over seeds and images, with confidence intervals by Student's t."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import t

from dulbe_peft.metrics.task_features import Answers

ALPHA = 0.05
ROUNDING = 1e-12
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


@dataclass(frozen=True)
class Estimated:
    """A mean, its variance, and Satterthwaite's degrees of freedom of the variance."""

    mean: float
    variance: float
    freedom: float

    @property
    def p(self) -> float:
        """The p-value of the hypothesis that the true mean is zero, by Student's t."""
        if not self.variance:
            return 0.0 if abs(self.mean) > ROUNDING else 1.0
        return float(2 * t.sf(abs(self.mean) / self.variance**0.5, self.freedom))

    def interval(self, alpha: float = ALPHA) -> Difference:
        """Return the interval that covers the true mean with probability 1 - alpha."""
        half = float(t.ppf(1 - alpha / 2, self.freedom) * self.variance**0.5) if self.variance else 0.0
        # Differences that cancel leave rounding errors. Round, so that an interval that ends at zero includes zero.
        return Difference(self.mean, round(self.mean - half, 12) + 0.0, round(self.mean + half, 12) + 0.0)


def estimated(values: np.ndarray) -> Estimated:
    """Estimate the mean of `values`, (seeds, images), and how certain it is.

    The variance of the mean is the variance of the seeds' means divided by the number of seeds, plus the variance of
    the images' means divided by the number of images. The degrees of freedom are those of Welch and Satterthwaite, see
    "An Approximate Distribution of Estimates of Variance Components", 1946, equation 17. With one seed, the variance
    covers only the variation between test images.
    """
    sides = (values.mean(axis=1), values.mean(axis=0))
    parts = [(means.var(ddof=1) / len(means), len(means) - 1) for means in sides if len(means) > 1]
    variance = float(sum(part for part, _ in parts))
    freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts) if variance else 1.0
    return Estimated(float(values.mean()), variance, freedom)


def mean_interval(values: np.ndarray) -> Difference:
    """Return the mean of `values`, (seeds, images), and its 95 % interval, over both seeds and images."""
    return estimated(values).interval()


def holm_intervals(means: Sequence[Estimated]) -> list[Difference]:
    """Return intervals of several means at the levels of Holm's step-down test.

    An interval excludes zero exactly if the test rejects that its true mean is zero, and the probability of any false
    rejection is at most 5 %. The k-th smallest of m p-values is tested at the level 0.05 / (m - k + 1), and the first
    one that is not rejected fixes the level of all larger ones.
    """
    intervals, level, left = dict[int, Difference](), 0.0, len(means)
    for place in sorted(range(len(means)), key=lambda place: means[place].p):
        intervals[place] = means[place].interval(level or ALPHA / left)
        if not intervals[place].clear:
            level = level or ALPHA / left
        left -= 1
    return [intervals[place] for place in range(len(means))]
