"""The historical support of a layer, and the shared and residual directions beside it, as pure functions."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dulbe_peft.subspaces.decompositions import EPS64, eigh, fix_signs, second_moment, to_float64, top_eigenvectors

EPS32 = torch.finfo(torch.float32).eps


def historical_support(
    statistic: torch.Tensor, support_rank: int, residual_rank: int, name: str = "S"
) -> torch.Tensor:
    """Dominant eigenvectors of an occupation statistic: the directions earlier tasks used.

    Args:
        statistic: S, (d_in, d_in), symmetric positive semi-definite; or a factor F, (fewer than d_in, d_in), which
            stands for S = F'F.
        support_rank: K_h, how many eigenvectors to take at most.
        residual_rank: r_R, how many dimensions must stay outside the support.
        name: what an error message calls the matrix.

    Returns:
        U, (d_in, K_eff), float32, orthonormal columns in descending order of their eigenvalue. K_eff is the smallest
        of K_h, the number of eigenvalues above d_in * eps(float32) * the largest, and d_in - r_R; it may be 0.

    Raises:
        ValueError: the matrix has more rows than columns, is not finite, is square but not symmetric positive
            semi-definite, or cannot be decomposed.

    Reference:
        "Historical Visual-Mode Occupation", the eigendecomposition of S_<t.
    """
    if statistic.ndim != 2 or statistic.shape[0] > statistic.shape[1]:
        shape = f"got shape {tuple(statistic.shape)}"
        raise ValueError(f"{name} must be a square matrix, or a factor of fewer rows than columns, {shape}")
    rows, width = statistic.shape
    count = max(0, min(support_rank, width - residual_rank, rows))
    floor = width * EPS32
    if rows == width:
        _, vectors = top_eigenvectors(second_moment(statistic, name), count, name, relative=floor)
    else:
        # F'F has the eigenvalues of the small matrix FF'; an eigenvector w of FF' gives F'w of F'F.
        factor = to_float64(statistic, name)
        _, small = top_eigenvectors(factor @ factor.T, count, name, relative=floor)
        vectors = torch.linalg.qr(F.normalize(factor.T @ small, dim=0)).Q
    return fix_signs(vectors).to(statistic.device, torch.float32)


def allocate_layer(
    gradient: torch.Tensor, support: torch.Tensor | None, shared_rank: int, residual_rank: int, name: str = "G"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frozen bases of one layer's shared and residual modes.

    Without a support (the first task) the top right singular vectors of G, the first r_S of them shared. With one,
    P_S = U q, q the top eigenvectors of U'G'GU, and P_R the top right singular vectors of G(I - UU'). Directions that
    the gradient does not determine are filled up: those of P_R outside U; those of P_S that a support of fewer than
    r_S columns leaves open by the singular vectors of G(I - UU') that follow P_R.

    Args:
        gradient: G, (d_out, d_in), prospective gradient.
        support: U, (d_in, K_eff), orthonormal columns, K_eff <= d_in - r_R; None at the first task.
        shared_rank: r_S.
        residual_rank: r_R.
        name: what an error message calls the gradient.

    Returns:
        P_S, (d_in, r_S), and P_R, (d_in, r_R), float32, together orthonormal; P_R is orthogonal to U.

    Raises:
        ValueError: G is not a finite matrix, the ranks exceed d_in, or U does not fit.

    Reference:
        "Rewritable Shared Mode", "Low-Interference Residual Modes", "Subspace-Frozen Parameterization"; for r_S > 1
        appendix Eq. layer_shared_basis.
    """
    if gradient.ndim != 2:
        raise ValueError(f"{name} must have 2 dimensions (d_out, d_in), got shape {tuple(gradient.shape)}")
    width = gradient.shape[1]
    if shared_rank + residual_rank > width:
        raise ValueError(f"{name}: shared_rank {shared_rank} + residual_rank {residual_rank} exceed d_in = {width}")
    matrix = to_float64(gradient, name)
    if support is None:
        basis = _dominant_directions(matrix, matrix.new_zeros(width, 0), shared_rank + residual_rank, name)
        shared, residual = basis[:, :shared_rank], basis[:, shared_rank:]
    else:
        occupied = _check_support(support, width, residual_rank, name)
        inside = min(shared_rank, occupied.shape[1])
        response = matrix @ occupied
        _, rotation = eigh(response.T @ response, f"U'G'GU of {name}", inside)
        outside = _dominant_directions(matrix, occupied, residual_rank + shared_rank - inside, name)
        shared = torch.cat([fix_signs(occupied @ rotation), outside[:, residual_rank:]], dim=1)
        residual = outside[:, :residual_rank]
    shared, residual = (basis.to(gradient.device, torch.float32).contiguous() for basis in (shared, residual))
    return shared, residual


def orthonormal_complement(basis: torch.Tensor, count: int) -> torch.Tensor:
    """`count` orthonormal directions outside a basis, the same ones at every call.

    Args:
        basis: (d, k), orthonormal columns, k >= 0.
        count: how many columns to return, at most d - k.

    Returns:
        (d, count), in `basis`' dtype, orthogonal to its columns.

    Raises:
        ValueError: fewer than `count` dimensions are left.
    """
    width, taken = basis.shape
    if count > width - taken:
        raise ValueError(f"{count} directions outside a basis of {taken} do not fit into {width} dimensions")
    if count == 0:
        return basis.new_zeros(width, 0)
    reflectors, scales = torch.geqrf(basis)
    chosen = torch.eye(width, dtype=basis.dtype, device=basis.device)[:, taken : taken + count]
    return torch.ormqr(reflectors, scales, chosen)


def _dominant_directions(matrix: torch.Tensor, avoid: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """Top right singular vectors of `matrix` (I - `avoid` `avoid`'), filled up outside it; float64, (d, count)."""
    width = matrix.shape[1]
    projected = matrix - (matrix @ avoid) @ avoid.T
    wide = matrix.shape[0] < width
    # The smaller Gram matrix is enough: squaring costs half the digits, which float64 has to spare for a float32 G.
    gram = projected @ projected.T if wide else projected.T @ projected
    # Against |G|, not |G(I - UU')|: what is left of a G inside U is rounding, and its directions fall back into U.
    threshold = max(matrix.shape) * EPS64 * float(matrix.square().sum())
    _, vectors = top_eigenvectors(gram, min(count, len(gram)), f"Gram matrix of {name}", absolute=threshold)
    directions = projected.T @ vectors if wide else vectors
    directions = torch.linalg.qr(F.normalize(directions, dim=0)).Q
    rest = orthonormal_complement(torch.cat([avoid, directions], dim=1), count - directions.shape[1])
    return torch.cat([fix_signs(directions), rest], dim=1)


def _check_support(support: torch.Tensor, width: int, residual_rank: int, name: str) -> torch.Tensor:
    """The support in float64, orthonormal beyond the rounding of its float32 columns."""
    if support.ndim != 2 or support.shape[0] != width or support.shape[1] > width - residual_rank:
        expected = f"(d_in, at most d_in - residual_rank) = ({width}, at most {width - residual_rank})"
        raise ValueError(f"support of {name} must have shape {expected}, got {tuple(support.shape)}")
    occupied = to_float64(support, f"support of {name}")
    identity = torch.eye(support.shape[1], dtype=torch.float64, device=occupied.device)
    if support.shape[1] and (occupied.T @ occupied - identity).abs().max() > 1e-3:
        raise ValueError(f"support of {name} must have orthonormal columns")
    return torch.linalg.qr(occupied).Q
