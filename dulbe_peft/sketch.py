"""A second moment S = X'X kept as fewer rows than columns: a factor F (rows, d_in) with F'F close to S from below.

Frequent directions. New rows join the factor; where there are more than it holds, they are rotated onto their
principal axes, and with delta the first eigenvalue that has no row left, every eigenvalue of the lower half loses
delta and the upper half stays. What is lost is at most delta in any direction and delta in half of the rows at least,
so with `error` the sum of all deltas, and for every k below rows/2

    0 <= x'(S - F'F)x <= error |x|^2      and      error <= (sum of S's eigenvalues after the k largest) / (rows/2 - k)

in exact arithmetic; sketches of parts, stacked and shrunk, are a sketch of the whole under the same bounds. Rounding
in float32 adds to all of them a share of S's largest eigenvalue, in the order of 1e-8 for each batch: it shows where S
has hardly any tail.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dulbe_peft.decompositions import eigh, fix_signs, to_float64
from dulbe_peft.functional import EPS32, without_autocast


@torch.no_grad()
def extend(
    factor: torch.Tensor | None, error: float, tokens: torch.Tensor, size: int, name: str
) -> tuple[torch.Tensor, float]:
    """The sketch of X'X plus what a factor stands for.

    Args:
        factor: F, (size, d_in), float32; None stands for zero.
        error: its error.
        tokens: X, (..., d_in).
        size: rows of the sketch, fewer than d_in.
        name: what an error message calls the tokens.

    Returns:
        The new factor, (size, d_in), float32, and its error.

    Raises:
        ValueError: the tokens are not finite, or their squares overflow float32.
    """
    rows = tokens.detach().reshape(-1, tokens.shape[-1]).float()
    width = rows.shape[1]
    factor = rows.new_zeros(size, width) if factor is None else factor
    # Up to there one Gram matrix of the columns costs less than many of rows.
    chunk = len(rows) if width <= 4 * size else 2 * size
    for part in rows.split(chunk):
        factor, loss = shrink(torch.cat([factor, part]), size, name)
        error += loss
    return factor, error


@torch.no_grad()
def shrink(rows: torch.Tensor, size: int, name: str) -> tuple[torch.Tensor, float]:
    """A factor of `size` rows for (n, d_in) float32 rows, and delta, what it lacks at most in any direction.

    Raises:
        ValueError: the rows are not finite, or their squares overflow float32.
    """
    with without_autocast(rows):
        wide = len(rows) < rows.shape[1]
        gram = rows @ rows.T if wide else rows.T @ rows
        values, vectors = eigh(to_float64(gram, name), name)
        values = values.clamp(min=0)
        delta = float(values[size]) if len(values) > size else 0.0
        values, vectors = values[:size], vectors[:, :size]
        kept = values.clone()
        kept[size // 2 :] = (kept[size // 2 :] - delta).clamp(min=0)
        if wide:
            # The rotated rows have squared norms `values`; where those are zero, so are the rows.
            weights = vectors * (kept / values.clamp(min=torch.finfo(values.dtype).tiny)).sqrt()
            factor = weights.T.to(rows) @ rows
        else:
            factor = (vectors * kept.sqrt()).T.to(rows)
    return F.pad(factor, (0, 0, 0, size - len(factor))), delta


def sketched_support(factor: torch.Tensor, support_rank: int, residual_rank: int, name: str = "F") -> torch.Tensor:
    """As `functional.historical_support` of F'F, in float64 and without a (d_in, d_in) matrix.

    Args:
        factor: F, (rows, d_in), rows < d_in.
        support_rank: K_h, how many eigenvectors to take at most.
        residual_rank: r_R, how many dimensions must stay outside the support.
        name: what an error message calls the factor.

    Returns:
        U, (d_in, K_eff), float32, orthonormal columns in descending order of their eigenvalue; K_eff is the smallest
        of K_h, the number of eigenvalues above d_in * eps(float32) * the largest, d_in - r_R and the rows.

    Raises:
        ValueError: the factor is not finite or cannot be decomposed.
    """
    rows = to_float64(factor, name)
    width = rows.shape[1]
    values, vectors = eigh(rows @ rows.T, name)
    count = max(0, min(support_rank, width - residual_rank, int((values > width * EPS32 * values[0]).sum())))
    # Once more orthonormal: the small ones' directions carry the rounding of the Gram matrix.
    directions = torch.linalg.qr(rows.T @ vectors[:, :count] / values[:count].sqrt()).Q
    return fix_signs(directions).to(factor.device, torch.float32)
