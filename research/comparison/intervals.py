"""What a comparison's figures are, and how sure: means over seeds and images, and Student's intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import t

from dulbe_peft.metrics.features import Answers

Measure = Literal["last", "average", "forgetting"]  # A_last, A_bar, and what earlier tasks have lost since their best


def image_shares(answers: Sequence[Answers], class_names: Sequence[str]) -> dict[Measure, np.ndarray]:
    """What every test image adds to each measure, (n,) each, with images in the order of their class names.

    All measures are means over images: A_last of whether the image is right after the last task T, A_bar of

        n / T * sum over the tasks t that have seen the image's class of right_t / n_t

    with n_t test images after task t, and forgetting of n / (n_i (T - 1)) * (right_b - right_T) for images of a task i
    before the last one, which has n_i images and was known best after task b. So they can be compared image by image.
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
        own = np.flatnonzero(tasks == number)
        best = max((step[own] for step in right[:-1] if len(step) > own[-1]), key=np.mean)
        lost[own] = (best - right[-1][own]) * (total / len(own) / len(earlier))
    rank = {name: place for place, name in enumerate(sorted(class_names))}
    order = np.argsort([rank[class_names[int(index)]] for index in last.truth], kind="stable")
    return {"last": right[-1][order], "average": average[order], "forgetting": lost[order]}


def mean_share(shares: np.ndarray) -> float:
    """The accuracy that the shares of images, (n,), make up; shares that are all right can round to more than 1."""
    return min(1.0, float(shares.mean()))


@dataclass(frozen=True)
class Difference:
    """A mean over seeds and images, such as that of the difference of two rows, and the ends of its interval."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def mean_interval(values: np.ndarray) -> Difference:
    """The mean of `values`, (seeds, images), and its 95 % interval by Student's t, with seeds and images both drawn.

    The variance of the mean is that of the seeds' means over S plus that of the images' means over n. The degrees of
    freedom are Welch's and Satterthwaite's, see "An Approximate Distribution of Estimates of Variance Components",
    1946, equation 17. With one seed, the interval speaks of the test images alone.
    """
    sides = (values.mean(axis=1), values.mean(axis=0))
    parts = [(means.var(ddof=1) / len(means), len(means) - 1) for means in sides if len(means) > 1]
    mean, variance = float(values.mean()), sum(part for part, _ in parts)
    half = 0.0
    if variance:
        freedom = variance**2 / sum(part**2 / degrees for part, degrees in parts)
        half = float(t.ppf(0.975, freedom) * variance**0.5)
    # Wins and losses that cancel leave rounding errors. An interval that ends at zero must hold zero.
    return Difference(mean, round(mean - half, 12) + 0.0, round(mean + half, 12) + 0.0)
