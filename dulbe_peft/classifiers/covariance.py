"""Estimate covariances from few images, by shrinkage toward a multiple of the identity."""

from typing import Literal

import torch
from torch import Tensor


def shrunk_covariance(scatter: Tensor, freedom: int, shrinkage: float | Literal["oas"], otherwise: float) -> Tensor:
    """Return Sigma = (1 - s) W / f + s (tr W / f d) I, (d, d), float64.

    `scatter` is W, (d, d), float64, with f degrees of `freedom`. If all images of each class are equal, the result is
    `otherwise` times I.
    """
    identity = torch.eye(len(scatter), dtype=torch.float64, device=scatter.device)
    variance = float(scatter.trace()) / max(freedom, 1) / len(scatter)
    # If all images of each class are equal, rounding errors leave a trace of about 1e-32.
    if freedom == 0 or variance < 1e-20:
        return identity * otherwise
    sample = scatter / freedom
    share = oas_shrinkage(sample, freedom) if shrinkage == "oas" else float(shrinkage)
    return (1 - share) * sample + share * variance * identity


def oas_shrinkage(covariance: Tensor, freedom: int, width: int | None = None) -> float:
    """Compute the shrinkage toward the scaled identity by equation 23 of Chen et al., 2010.

    `width` is the number of dimensions, if the covariance is zero in those that it leaves out.
    """
    d = width or len(covariance)
    square, trace = float((covariance * covariance).sum()), float(covariance.trace())
    over = (freedom + 1 - 2 / d) * (square - trace * trace / d)
    return min(1.0, ((1 - 2 / d) * square + trace * trace) / over) if over > 0 else 1.0
