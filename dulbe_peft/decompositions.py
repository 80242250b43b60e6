"""Leading eigenvectors of symmetric matrices in float64, by the cheapest way whose result is certified.

A large matrix whose eigenvalues decay costs a small part of its full decomposition; one whose eigenvalues do not costs
a decomposition in float32 and a correction.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

EPS64 = torch.finfo(torch.float64).eps
# How far the returned subspace may be from the exact one, as the sine of the largest angle, where there is a gap.
ANGLE = 1e-5
# A Krylov space is given up where, a little beyond its first check, a wanted pair's relative residual is still above
# this: on matrices with decaying eigenvalues it is below, on those of noise far above for long.
SLOW = 0.06
# Below this width a full decomposition is the cheapest way.
LARGE = 320


def top_eigenvectors(
    matrix: torch.Tensor, count: int, name: str, absolute: float = 0.0, relative: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eigenvectors of the largest eigenvalues, as many as count.

    Large matrices are projected on a growing Krylov space, always the same one; where that converges slowly, they are
    decomposed in float32 and the leading eigenvectors corrected. What comes out is taken only where it is certified:
    all eigenvalues that were not found lie below the ones that were (the shifted remainder of the whole matrix has a
    Cholesky factor), and the residuals bound the sine of the largest angle to the exact subspace by 1e-5 or, where no
    gap defines that subspace, are down at the rounding of a full decomposition. Else the matrix is decomposed in full.

    Args:
        matrix: (d, d), float64, symmetric up to rounding, finite.
        count: how many eigenvectors to take at most, at most d.
        name: what an error message calls the matrix.
        absolute: only eigenvalues above this are taken,
        relative: and above this times the largest one.

    Returns:
        Values in descending order, at least as many as vectors, and vectors (d, k), k <= count, orthonormal; the first
        k values are theirs. The last value is the smallest eigenvalue or, of a large matrix, an estimate from above.

    Raises:
        ValueError: the matrix is not finite or cannot be decomposed.
    """
    # Matrix products are fastest with such a number of columns.
    width, block = len(matrix), 24 * max(1, -(-count // 72))
    if count and width >= max(LARGE, 8 * (count + block)):
        for fast in (_krylov, _refined):
            found = fast(matrix, count, block, absolute, relative)
            if found is not None:
                return found
    values, vectors = eigh(matrix, name)
    return values, vectors[:, : _above(values[:count], absolute, relative)]


def eigh(matrix: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All eigenvalues in descending order and eigenvectors of a symmetric float64 matrix.

    Raises:
        ValueError: the matrix is not finite or cannot be decomposed.
    """
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{name} holds NaN or infinity")
    symmetric = (matrix + matrix.T) / 2
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except torch.linalg.LinAlgError:
        # Clustered eigenvalues can stop the iteration; a ramp far below float32 rounding pulls them apart.
        step = EPS64 * float(symmetric.abs().max())
        ramp = torch.arange(1, len(symmetric) + 1, dtype=symmetric.dtype, device=symmetric.device) * step
        try:
            values, vectors = torch.linalg.eigh(symmetric + torch.diag(ramp))
        except torch.linalg.LinAlgError as error:
            raise ValueError(f"eigendecomposition of {name}, shape {tuple(matrix.shape)}, failed: {error}") from error
    return values.flip(0), vectors.flip(1)


def asymmetry(matrix: torch.Tensor, rows: int = 512) -> float:
    """Largest difference between an entry and its mirror image, by blocks for the cache's sake."""
    blocks = range(0, len(matrix), rows)
    gaps = [(matrix[i : i + rows, i:] - matrix[i:, i : i + rows].T).abs().max() for i in blocks]
    return float(torch.stack(gaps).max())


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Columns turned so that the entry of largest magnitude is positive: the same bases on every machine."""
    if not vectors.shape[1]:
        return vectors
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def to_float64(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """The matrix in float64, detached.

    Raises:
        TypeError: it is no floating-point tensor.
        ValueError: it has no rows, or is not finite.
    """
    if not matrix.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {matrix.dtype}")
    if not matrix.numel() and matrix.shape[0] == 0:
        raise ValueError(f"{name} is empty, shape {tuple(matrix.shape)}")
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{name} holds NaN or infinity")
    matrix = matrix.detach()
    # MPS has no float64.
    return (matrix.cpu() if matrix.device.type == "mps" else matrix).to(torch.float64)


def _above(values: torch.Tensor, absolute: float, relative: float) -> int:
    """How many of the descending values count."""
    if not len(values):
        return 0
    return int((values > max(absolute, relative * float(values[0]))).sum())


def _krylov(
    matrix: torch.Tensor, count: int, block: int, absolute: float, relative: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and vectors as `top_eigenvectors` returns them, or None where they cannot be certified."""
    width = len(matrix)
    start = torch.randn(width, block, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype)
    # Vectors lie in rows: products of a few long rows are nearly twice as fast as those of columns.
    fresh = torch.linalg.qr(start.to(matrix.device)).Q.T
    space, size = matrix.new_empty(width // 3, width), 0
    compressed = matrix.new_empty(0, 0)
    due = float(2 * count + block)
    while size + block <= len(space):
        space[size : size + block] = fresh
        size += block
        basis = space[:size]
        image = fresh @ matrix
        overlap = image @ basis.T
        compressed = F.pad(compressed, (0, block, 0, block))
        compressed[-block:] = overlap
        compressed[:, -block:] = overlap.T
        fresh, coupling = torch.linalg.qr(torch.addmm(image, overlap, basis, alpha=-1).T)
        # Once more: where the remainder is small, its rounding falls back into the basis.
        fresh = fresh.T - (fresh.T @ basis.T) @ basis
        fresh = torch.linalg.qr(fresh.T).Q.T
        if size < due:
            continue
        due = size * 1.15
        values, rotation = eigh(compressed, "compressed matrix")
        # What the matrix makes of each Ritz vector outside the basis; inside it they are decoupled.
        residuals = (coupling @ rotation[-block:]).norm(dim=0)
        found = _above(values[:count], absolute, relative)
        cutoff = max(absolute, relative * float(values[0])) if found < count else None
        kept = _trustworthy(values, residuals, found, cutoff, width)
        if kept is not None:
            vectors = basis.T @ rotation[:, :kept]
            bound = _midpoint(values, found, kept)
            return (values, vectors[:, :found]) if _none_above(bound, matrix, values[:kept], vectors) else None
        if size > 2.4 * count + block and (residuals[:found] > SLOW * values[:found]).any():
            return None
    return None


def _refined(
    matrix: torch.Tensor, count: int, block: int, absolute: float, relative: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As `_krylov`: float32 eigenvectors, each corrected to first order by those outside the block, and projected."""
    scale = matrix.abs().max()
    if scale == 0:
        return None
    try:
        coarse, rough = torch.linalg.eigh((matrix / scale).float())
    except torch.linalg.LinAlgError:
        return None
    kept = count + block
    coarse, rough = coarse.flip(0), rough.flip(1)
    vectors, outside = rough[:, :kept].to(matrix.dtype), rough[:, kept:].contiguous()
    for _ in range(4):
        vectors = torch.linalg.qr(vectors).Q
        image = matrix @ vectors
        values, rotation = eigh(vectors.T @ image, "compressed matrix")
        vectors, image = vectors @ rotation, image @ rotation
        remainder = image - vectors * values
        found = _above(values[:count], absolute, relative)
        cutoff = max(absolute, relative * float(values[0])) if found < count else None
        apart = _trustworthy(values, remainder.norm(dim=0), found, cutoff, len(matrix))
        if apart is not None:
            bound = _midpoint(values, found, apart)
            if not _none_above(bound, matrix, values[:apart], vectors[:, :apart]):
                return None
            return torch.cat([values, (scale * coarse[-1:]).to(values)]), vectors[:, :found]
        gaps = (values / scale).float() - coarse[kept:, None]
        part = outside.T @ (remainder / scale).float() / gaps.clamp(min=1e-6)
        vectors = vectors + (outside @ part).to(vectors)
    return None


def _midpoint(values: torch.Tensor, found: int, kept: int) -> float:
    """Halfway from the last eigenvalue wanted to the last one known."""
    return float(values[max(found, 1) - 1] + values[kept - 1]) / 2


def _trustworthy(
    values: torch.Tensor, residuals: torch.Tensor, found: int, cutoff: float | None, width: int
) -> int | None:
    """How many Ritz pairs to set apart so that the first `found` are good enough; None where there is no such number.

    Let the first `found` pairs have residuals R1, the others set apart R2, and all eigenvalues besides lie below the
    midpoint, at a distance of at least `far` from the wanted ones; `near` is the gap between wanted and others. The
    exact wanted subspace has components z2 <= |R2| z3 / near and z3 <= (|R1| + |R2| z2) / far, hence
    z3 <= |R1| / far / (1 - |R2|^2 / (near far)).
    """
    first = max(found, 1) - 1
    rounding = width * EPS64 * values[0].abs()
    wanted = residuals[:found].square().sum().sqrt() + rounding
    others = residuals[found:].square().cumsum(0).sqrt() + rounding
    far = (values[first] - values[found:]) / 2
    near = (values[first] - values[found]).clamp(min=0)
    pull = others.square() / far
    angle = wanted / far * (1 + (others / near).square()).sqrt() / (1 - pull / near)
    good = (pull < near) & (angle < ANGLE)
    # Without a gap there is no subspace to come near to: as good as a full decomposition will do.
    good |= (pull <= rounding) & (wanted <= 2 * rounding)
    if cutoff is not None:
        good &= values[found] + pull < cutoff
    good &= far > 0
    if not good.any():
        return None
    return found + 1 + int(torch.where(good, far, 0).argmax())


def _none_above(bound: float, matrix: torch.Tensor, values: torch.Tensor, vectors: torch.Tensor) -> bool:
    """Whether all eigenvalues but those set apart are below a bound: the shifted remainder has a Cholesky factor."""
    width = len(matrix)
    rounding = width * torch.finfo(torch.float32).eps * bound
    dtype = torch.float32 if 4 * rounding < bound - float(values[-1]) else torch.float64
    remainder = torch.zeros_like(matrix, dtype=dtype)
    scaled = vectors * values
    # The factorisation reads the lower triangle alone.
    for i in range(0, width, 512):
        rows = slice(i, i + 512)
        remainder[rows, : i + 512] = torch.addmm(matrix[rows, : i + 512], scaled[rows], vectors[: i + 512].T, beta=-1)
    remainder.diagonal().add_(bound - rounding if dtype == torch.float32 else bound)
    return int(torch.linalg.cholesky_ex(remainder).info) == 0
