"""Probabilities that mean what they say: one temperature, fitted on held-back images of each new task.

    probabilities = softmax(logits / T)

A task's held-back images are a fifth of each of its classes' images. A copy of the classifier learns without them, T
is fitted on them, and the classifier then learns from all images. No image of an earlier task is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

FOLDS = 5
LARGEST_TEMPERATURE = 1000.0


@dataclass(frozen=True)
class Calibration:
    """The temperature of a classifier's probabilities, over all tasks so far.

    Args:
        log_temperature: log T, the mean over the tasks, each weighted by its held-back images.
        images: the number of held-back images of all tasks; 0 where nothing has been fitted, and T is 1.
    """

    log_temperature: float = 0.0
    images: int = 0

    def __post_init__(self) -> None:
        number = isinstance(self.log_temperature, (int, float)) and not isinstance(self.log_temperature, bool)
        if not number or not abs(self.log_temperature) <= math.log(LARGEST_TEMPERATURE) + 1e-6:
            limits = f"1/{LARGEST_TEMPERATURE:.0f} to {LARGEST_TEMPERATURE:.0f}"
            raise ValueError(f"log_temperature must be of a temperature from {limits}, got {self.log_temperature!r}")
        if isinstance(self.images, bool) or not isinstance(self.images, int) or self.images < 0:
            raise ValueError(f"images of a calibration must be an int of at least 0, got {self.images!r}")

    @property
    def temperature(self) -> float:
        return math.exp(self.log_temperature)

    def joined(self, log_temperature: float, images: int) -> Calibration:
        """This calibration and a further task's."""
        total = self.images + images
        if not images:
            return self
        return Calibration((self.images * self.log_temperature + images * log_temperature) / total, total)

    @classmethod
    def read(cls, saved: Any) -> Calibration:
        """The calibration in a file or a state dict; None is one without a fit, as older files hold.

        Raises:
            ValueError: a field is missing, surplus or out of range.
        """
        if saved is None:
            return cls()
        if not isinstance(saved, dict) or set(saved) != {"log_temperature", "images"}:
            raise ValueError(f"calibration must hold log_temperature and images, got {saved!r:.100}")
        return cls(**saved)


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
    fixed = torch.arange(1, images.shape[1] + 1, dtype=torch.float64).sin().to(images)
    # A product with a matrix may round a row differently at another place in it; a sum over the row does not.
    ranking = (images * fixed).sum(dim=1)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        ranked = rows[ranking[rows].argsort()]
        held[ranked[FOLDS // 2 :: FOLDS] if len(rows) >= FOLDS else ranked[1:2]] = True
    return held


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor, steps: int = 60) -> float:
    """log T with the least negative log-likelihood of held-back images, between the limits.

    The loss is convex in 1/T, so its derivative is bisected, in float64. One image in n + 2 counts as its strongest
    rival class, as in Platt's method; without that, T would go to 0 wherever every held-back image is right.

    Args:
        logits: (n, C), of held-back images, n at least 1, C at least 2.
        labels: (n,), integers, columns of `logits`.
        steps: number of bisections.

    Reference:
        Guo et al., "On Calibration of Modern Neural Networks", 2017, section 4.2; Platt, "Probabilistic Outputs for
        Support Vector Machines", 1999, section 2.2.
    """
    logits = logits.double()
    own = logits.gather(1, labels[:, None])
    rival = logits.scatter(1, labels[:, None], -torch.inf).amax(dim=1, keepdim=True)
    doubt = 1 / (len(logits) + 2)
    logits = logits - (1 - doubt) * own - doubt * rival
    low, high = -math.log(LARGEST_TEMPERATURE), math.log(LARGEST_TEMPERATURE)
    for _ in range(steps):
        middle = (low + high) / 2
        slope = ((logits * math.exp(-middle)).softmax(dim=1) * logits).sum()
        low, high = (low, middle) if slope < 0 else (middle, high)
    return (low + high) / 2
