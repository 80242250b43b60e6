"""Covariances from few images: shrunk toward a multiple of the identity."""

from typing import Literal

import torch
from torch import Tensor


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


def oas_shrinkage(covariance: Tensor, freedom: int) -> float:
    """The shrinkage toward the scaled identity of Chen et al., 2010, equation 23."""
    d = len(covariance)
    square, trace = float((covariance * covariance).sum()), float(covariance.trace())
    over = (freedom + 1 - 2 / d) * (square - trace * trace / d)
    return min(1.0, ((1 - 2 / d) * square + trace * trace) / over) if over > 0 else 1.0
