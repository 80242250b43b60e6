"""Leading eigenvectors of symmetric matrices, in float64. Error messages name the matrix."""

import torch
from scipy import linalg

EPS64 = torch.finfo(torch.float64).eps


def to_float64(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """Return the matrix in float64, detached; raise an error if it is not finite, as LAPACK would return garbage."""
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{name} holds NaN or infinity")
    matrix = matrix.detach()
    # MPS has no float64.
    return (matrix.cpu() if matrix.device.type == "mps" else matrix).to(torch.float64)


def top_eigenvectors(
    matrix: torch.Tensor, count: int, name: str, absolute: float = 0.0, relative: float = 0.0
) -> torch.Tensor:
    """Return the eigenvectors of (d, d) for its `count` largest eigenvalues, without those that are too small.

    An eigenvalue is kept if it is above `absolute` and above `relative` times the largest one.
    """
    values, vectors = eigh(matrix, name, count)
    return vectors[:, (values > absolute) & (values > relative * values[:1])]


def eigh(matrix: torch.Tensor, name: str, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest eigenvalues of (d, d) (by default all), in descending order, and the eigenvectors."""
    width = len(matrix)
    count = width if count is None else count
    if not count:
        return matrix.new_zeros(0), matrix.new_zeros(width, 0)
    try:
        if matrix.device.type == "cpu":
            subset = (width - count, width - 1)  # LAPACK computes only these pairs
            arrays = linalg.eigh(matrix.numpy(), subset_by_index=subset, check_finite=False)
            values, vectors = (torch.from_numpy(array) for array in arrays)
            if len(values) < count:  # LAPACK may lose some of many equal eigenvalues and still report success
                raise linalg.LinAlgError(f"found {len(values)} of {count} eigenvalues")
        else:
            values, vectors = torch.linalg.eigh(matrix)
    except (linalg.LinAlgError, torch.linalg.LinAlgError):
        # LAPACK's divide-and-conquer algorithm may converge where the two algorithms above do not.
        try:
            values, vectors = (result.to(matrix.device) for result in torch.linalg.eigh(matrix.cpu()))
        except torch.linalg.LinAlgError as error:
            raise ValueError(f"eigendecomposition of {name}, shape {tuple(matrix.shape)}, failed: {error}") from error
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


def second_moment(statistic: torch.Tensor, name: str) -> torch.Tensor:
    """Return a sum of X'X, (d, d), in float64 and made exactly symmetric."""
    matrix = to_float64(statistic, name)
    check_symmetric(matrix, name)
    return (matrix + matrix.T) / 2


def check_symmetric(matrix: torch.Tensor, name: str) -> None:
    """Raise an error if (d, d) is not symmetric. A gap of 1 % of the largest entry is more than rounding."""
    if (matrix - matrix.T).abs().max() > 1e-2 * matrix.abs().max():
        raise ValueError(f"{name} is not symmetric: expected a sum of X'X over input tokens")


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """Return the columns, signed so that the entry of largest magnitude is positive, the same on every machine."""
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def orthonormal_complement(basis: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` orthonormal directions, (d, count), orthogonal to the basis, (d, k); the same in every call."""
    width, rank = basis.shape
    if count > width - rank:
        raise ValueError(f"{count} directions outside a basis of {rank} do not fit into {width} dimensions")
    if count == 0:
        return basis.new_zeros(width, 0)
    reflectors, scales = torch.geqrf(basis)
    chosen = torch.eye(width, dtype=basis.dtype, device=basis.device)[:, rank : rank + count]
    return torch.ormqr(reflectors, scales, chosen)
