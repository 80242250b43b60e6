"""Leading eigenvectors of symmetric matrices in float64. An error names the matrix."""

import torch
from scipy import linalg

EPS64 = torch.finfo(torch.float64).eps


def to_float64(matrix: torch.Tensor, name: str) -> torch.Tensor:
    """The matrix in float64, detached and known to be finite: LAPACK returns garbage for one that is not."""
    if not torch.isfinite(matrix).all():
        raise ValueError(f"{name} holds NaN or infinity")
    matrix = matrix.detach()
    # MPS has no float64.
    return (matrix.cpu() if matrix.device.type == "mps" else matrix).to(torch.float64)


def top_eigenvectors(
    matrix: torch.Tensor, count: int, name: str, absolute: float = 0.0, relative: float = 0.0
) -> torch.Tensor:
    """At most `count` eigenvectors of (d, d), of the largest values, above `absolute` and `relative` of the first."""
    values, vectors = eigh(matrix, name, count)
    return vectors[:, (values > absolute) & (values > relative * values[:1])]


def eigh(matrix: torch.Tensor, name: str, count: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest eigenvalues of (d, d) in descending order (None: all of them), and their eigenvectors."""
    width = len(matrix)
    count = width if count is None else count
    if not count:
        return matrix.new_zeros(0), matrix.new_zeros(width, 0)
    try:
        if matrix.device.type == "cpu":
            wanted = (width - count, width - 1)  # LAPACK computes no other pairs
            found = linalg.eigh(matrix.numpy(), subset_by_index=wanted, check_finite=False)
            values, vectors = (torch.from_numpy(array) for array in found)
            if len(values) < count:  # LAPACK reports success where it has lost some of many equal eigenvalues
                raise linalg.LinAlgError(f"found {len(values)} of {count} eigenvalues")
        else:
            values, vectors = torch.linalg.eigh(matrix)
    except (linalg.LinAlgError, torch.linalg.LinAlgError):
        # LAPACK's divide and conquer, a third algorithm, converges where the other two may not.
        try:
            values, vectors = (found.to(matrix.device) for found in torch.linalg.eigh(matrix.cpu()))
        except torch.linalg.LinAlgError as error:
            raise ValueError(f"eigendecomposition of {name}, shape {tuple(matrix.shape)}, failed: {error}") from error
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


def second_moment(statistic: torch.Tensor, name: str) -> torch.Tensor:
    """A sum of X'X, (d, d), in float64 and exactly symmetric."""
    matrix = to_float64(statistic, name)
    check_symmetric(matrix, name)
    return (matrix + matrix.T) / 2


def check_symmetric(matrix: torch.Tensor, name: str) -> None:
    """Raise where (d, d) is no sum of X'X; 1 % of the largest entry is more than rounding."""
    if (matrix - matrix.T).abs().max() > 1e-2 * matrix.abs().max():
        raise ValueError(f"{name} is not symmetric: expected a sum of X'X over input tokens")


def fix_signs(vectors: torch.Tensor) -> torch.Tensor:
    """The columns, with signs that make the entry of largest magnitude positive: the same bases on every machine."""
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def orthonormal_complement(basis: torch.Tensor, count: int) -> torch.Tensor:
    """`count` orthonormal directions outside a basis of orthonormal columns, (d, k): the same ones at every call."""
    width, taken = basis.shape
    if count > width - taken:
        raise ValueError(f"{count} directions outside a basis of {taken} do not fit into {width} dimensions")
    if count == 0:
        return basis.new_zeros(width, 0)
    reflectors, scales = torch.geqrf(basis)
    chosen = torch.eye(width, dtype=basis.dtype, device=basis.device)[:, taken : taken + count]
    return torch.ormqr(reflectors, scales, chosen)
