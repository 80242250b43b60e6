"""What a comparison's figures are, and how sure: means over seeds, paired differences, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dulbe_peft.metrics.features import Answers

DRAWS = 2000
LEVEL = 0.95


def image_shares(answers: Sequence[Answers], class_names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """What every test image adds to A_last and to A_bar, (n,) each, with images in the order of their class names.

    Both measures are means over images: A_last of whether the image is right after the last task, A_bar of

        n / T * sum over the tasks t that have seen the image's class of right_t / n_t

    with n_t test images after task t, n = n_T. So both can be resampled image by image.
    """
    last = answers[-1]
    total = len(last.truth)
    share = np.zeros(total)
    for step in answers:  # the images of earlier tasks come first, in the same order
        share[: len(step.truth)] += step.right.numpy() * (total / len(step.truth) / len(answers))
    rank = {name: place for place, name in enumerate(sorted(class_names))}
    names = np.array([rank[class_names[int(index)]] for index in last.truth])
    order = np.argsort(names, kind="stable")
    return last.right.numpy().astype(np.float64)[order], share[order]


def mean_share(shares: np.ndarray) -> float:
    """The accuracy that the shares of images, (n,), make up; shares that are all right can round to more than 1."""
    return min(1.0, float(shares.mean()))


@dataclass(frozen=True)
class Difference:
    """The mean difference between two rows, over seeds and images, and the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired_difference(
    values: np.ndarray, reference: np.ndarray, draws: int = DRAWS, level: float = LEVEL
) -> Difference:
    """The mean of `values - reference`, both (seeds, images), and its percentile bootstrap interval.

    Seeds and test images are drawn anew, with replacement, both sides with the same ones. With one seed, the interval
    speaks of the test images alone.

    Reference:
        Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, section 13.3; seeds and images are crossed as
        in Owen, "The Pigeonhole Bootstrap", 2007.
    """
    difference = values - reference
    seeds, images = difference.shape
    random = np.random.default_rng(0)
    drawn_seeds = random.multinomial(seeds, np.full(seeds, 1 / seeds), size=draws) / seeds
    means = np.empty(draws)
    for start in range(0, draws, 100):  # (draws, n) at once would take gigabytes for large test sets
        rows = slice(start, min(start + 100, draws))
        drawn = random.multinomial(images, np.full(images, 1 / images), size=rows.stop - start) / images
        means[rows] = ((drawn @ difference.T) * drawn_seeds[rows]).sum(axis=1)
    # Wins and losses that cancel leave rounding errors. An interval that ends at zero must hold zero.
    low, high = np.quantile(means.round(12) + 0.0, [(1 - level) / 2, (1 + level) / 2])
    return Difference(float(difference.mean()), float(low), float(high))
