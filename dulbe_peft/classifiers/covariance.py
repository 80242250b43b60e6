"""The covariance that all classes share: summed up image by image, shrunk, and what it makes of a space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


def shrunk_covariance(scatter: Tensor, freedom: int, shrinkage: float | Literal["oas"], otherwise: float) -> Tensor:
    """Sigma = (1 - s) W / f + s (tr W / f d) I, (d, d), float64; `otherwise` I while all images of a class are equal.

    `scatter` is W, (d, d), float64, with f degrees of `freedom`.
    """
    identity = torch.eye(len(scatter), dtype=torch.float64, device=scatter.device)
    variance = float(scatter.trace()) / max(freedom, 1) / len(scatter)
    # Rounding leaves a trace of about 1e-32 where all images of each class are equal.
    if freedom == 0 or variance < 1e-20:
        return identity * otherwise
    sample = scatter / freedom
    share = oas_shrinkage(sample, freedom) if shrinkage == "oas" else float(shrinkage)
    return (1 - share) * sample + share * variance * identity


def added_scatter(images: Tensor, labels: Tensor, old_means: Tensor, means: Tensor, old_counts: Tensor) -> Tensor:
    """What (n, d) images add to W: their scatter around the new means, and what old images lose as theirs move."""
    shift, spread = (means - old_means) * old_counts[:, None].sqrt(), images - means[labels]
    return shift.T @ shift + spread.T @ spread


def oas_shrinkage(covariance: Tensor, freedom: int) -> float:
    """The shrinkage toward the scaled identity of Chen et al., 2010, equation 23."""
    d = len(covariance)
    square, trace = float((covariance * covariance).sum()), float(covariance.trace())
    over = (freedom + 1 - 2 / d) * (square - trace * trace / d)
    return min(1.0, ((1 - 2 / d) * square + trace * trace) / over) if over > 0 else 1.0


def whitening_matrix(covariance: Tensor) -> Tensor:
    """Sigma^-1/2, (d, d), symmetric."""
    variances, directions = torch.linalg.eigh(covariance)
    return (directions * variances.clamp_min(1e-12).rsqrt()) @ directions.T


@dataclass(frozen=True)
class Whitening:
    """Takes images and texts to a space in which images of a class vary by 1 in every direction.

    Each kind is taken relative to its own mean over the classes, (d,), because images and texts lie in different
    places of the joint space. `matrix` is Sigma^-1/2, (d, d), of the shrunk covariance within the classes.
    """

    image_mean: Tensor
    text_mean: Tensor
    matrix: Tensor

    def images(self, rows: Tensor) -> Tensor:
        """Directions in the new space, (n, d), unit vectors."""
        return F.normalize((rows - self.image_mean) @ self.matrix, dim=1)

    def texts(self, rows: Tensor) -> Tensor:
        """Directions in the new space, (C, d), unit vectors."""
        return F.normalize((rows - self.text_mean) @ self.matrix, dim=1)
