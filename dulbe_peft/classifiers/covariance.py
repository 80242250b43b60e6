"""Estimate covariances from few images, by shrinkage toward a multiple of the identity; leave images out of them."""

from typing import Literal

import torch
from torch import Tensor

ROUNDING = 1e-20  # a smaller variance is a rounding error of equal images, about 1e-32


def shrunk_covariance(scatter: Tensor, freedom: int, shrinkage: float | Literal["oas"], otherwise: float) -> Tensor:
    """Return Sigma = (1 - s) W / f + s (tr W / f d) I, (d, d), float64.

    `scatter` is W, (d, d), float64, with f degrees of `freedom`. If all images of each class are equal, the result is
    `otherwise` times I.
    """
    identity = torch.eye(len(scatter), dtype=torch.float64, device=scatter.device)
    variance = float(scatter.trace()) / max(freedom, 1) / len(scatter)
    if freedom == 0 or variance < ROUNDING:
        return identity * otherwise
    sample = scatter / freedom
    share = oas_shrinkage(sample, freedom) if shrinkage == "oas" else float(shrinkage)
    return (1 - share) * sample + share * variance * identity


def oas_shrinkage(covariance: Tensor, freedom: int, width: int | None = None) -> float:
    """Compute the shrinkage toward the scaled identity by equation 23 of Chen et al., 2010.

    `width` is the number of dimensions, if the covariance is zero in those that it leaves out.
    """
    square, trace = float((covariance * covariance).sum()), float(covariance.trace())
    return oas_share(square, trace, freedom, width or len(covariance))


def oas_share(square: float, trace: float, freedom: int, d: int) -> float:
    """Compute `oas_shrinkage` from the sum of the squared entries of a covariance, (d, d), and its trace."""
    over = (freedom + 1 - 2 / d) * (square - trace * trace / d)
    return min(1.0, ((1 - 2 / d) * square + trace * trace) / over) if over > 0 else 1.0


def without_group(means: Tensor, counts: Tensor, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leave learned images x_i, (m, d), of classes c out; every class keeps at least one. In float64.

    With d_i = x_i - m_c, the sum u_c of the d_i of class c, and m_c of them,

        the mean of class c becomes its mean less u_c / (n_c - m_c)        the scatter W becomes W - V'V

    where V has the rows d_i and, for each class of the images, u_c / sqrt(n_c - m_c).

    Returns:
        The means, (C, d), and numbers of images, (C,), without the images, and V, (r, d).
    """
    left, classes = counts - labels.bincount(minlength=len(counts)).to(counts), labels.unique()
    away = images - means[labels]
    sums = torch.zeros_like(means).index_add(0, labels, away)
    down = torch.cat([away, sums[classes] / left[classes, None].sqrt()])
    return means - sums / left[:, None], left, down


def solved(rows: Tensor, noise: Tensor, down: Tensor, sign: int) -> Tensor:
    """Return the rows, (n, d), times (A + sign V'V)^-1, for A = diag(noise), (d,), and V = `down`, (r, d).

        (A - V'V)^-1 = A^-1 + A^-1 V'(I - V A^-1 V')^-1 V A^-1                                           (Woodbury)

    It is computed as it stands on the left if r is as large as half of d.
    """
    if 2 * len(down) >= len(noise):
        return torch.linalg.solve(torch.diag(noise) + sign * down.T @ down, rows.T).T
    by = down / noise
    inner = torch.eye(len(down)).to(by) + sign * by @ down.T
    return rows / noise - sign * torch.linalg.solve(inner, (rows @ by.T).T).T @ by
