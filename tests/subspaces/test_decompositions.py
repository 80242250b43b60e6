"""The leading eigenvectors of large matrices equal LAPACK's, also where an iteration alone would be wrong."""

import pytest
import torch

from dulbe_peft.subspaces import decompositions


def symmetric(values, seed=0):
    """Return a symmetric matrix with these eigenvalues, and its eigenvectors in the same order."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    matrix = (vectors * values) @ vectors.T
    return (matrix + matrix.T) / 2, vectors


WIDTH, COUNT = 480, 40
SPECTRA = {
    "slow decay": torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -0.5,
    "decay": torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -1.0,
    "fast decay": torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -2.0,
    "equal values": torch.cat([torch.ones(30), torch.linspace(0.5, 0.1, WIDTH - 30)]).double(),
    "low rank": torch.cat([torch.linspace(1, 0.1, 60), torch.zeros(WIDTH - 60)]).double(),
    "huge and tiny": torch.logspace(12, -12, WIDTH, dtype=torch.float64),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_leading_eigenvectors_of_large_matrices_are_exact(spectrum, monkeypatch):
    monkeypatch.setattr(decompositions, "LARGE", WIDTH)
    values = SPECTRA[spectrum]
    matrix, vectors = symmetric(values)
    found, basis = decompositions.eigh(matrix, "S", COUNT)
    torch.testing.assert_close(found, values[:COUNT], rtol=1e-10, atol=1e-10 * float(values[0]))
    exact = vectors[:, :COUNT]
    assert float(torch.linalg.matrix_norm(exact - basis @ (basis.T @ exact), 2)) < 1e-6
    if spectrum == "fast decay":  # without LAPACK
        assert decompositions._leading_eigenvectors(matrix, COUNT) is not None


def test_eigenvalue_that_the_iteration_misses_is_noticed(monkeypatch):
    """The start has no part in the second block of the matrix, so no step does, and its residuals say nothing."""
    values = torch.arange(1, WIDTH // 2 + 1, dtype=torch.float64) ** -1.0
    first, second = symmetric(values)[0], symmetric(values * 0.9, seed=1)[0]
    matrix, real = torch.block_diag(first, second), torch.randn

    def half(*shape, **settings):
        drawn = real(*shape, **settings)
        drawn[WIDTH // 2 :] = 0
        return drawn

    monkeypatch.setattr(torch, "randn", half)
    assert decompositions._leading_eigenvectors(matrix, 20) is None
    monkeypatch.setattr(decompositions, "LARGE", WIDTH)
    found, _ = decompositions.eigh(matrix, "S", 20)
    torch.testing.assert_close(found, torch.cat([values, values * 0.9]).sort(descending=True).values[:20])
