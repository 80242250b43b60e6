"""Supports and bases against a full decomposition in float64, on every kind of spectrum."""

import doctest

import pytest
import reference
import torch
from scipy import linalg

import dulbe_peft.subspaces.decompositions
from dulbe_peft.subspaces.decompositions import asymmetry, eigh, top_eigenvectors
from dulbe_peft.subspaces.support import allocate_layer, historical_support

WIDTH, COUNT = 120, 16


def rotation(width=WIDTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q


def matrix_of(values, seed=0):
    values = torch.as_tensor(values, dtype=torch.float64)
    axes = rotation(len(values), seed)
    return axes * values @ axes.T


def steps(*levels, rest=0.0):
    """A spectrum of (value, how often), the rest of the 120 filled up."""
    values = [value for value, times in levels for _ in range(times)]
    return torch.tensor(values + [rest] * (WIDTH - len(values)), dtype=torch.float64)


def distance(found, expected):
    """Spectral norm of the difference of two projectors."""
    found, expected = found.double(), expected.double()
    return float(torch.linalg.matrix_norm(found @ found.T - expected @ expected.T, 2))


RANDOM = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SPECTRA = {
    "random": torch.linalg.svdvals(RANDOM).square(),
    "decaying": 0.7 ** torch.arange(WIDTH),
    "decaying slowly": 1.0 / torch.arange(1, WIDTH + 1),
    "far apart": torch.logspace(30, -8, WIDTH, dtype=torch.float64),
    "flat": torch.linspace(1.0, 0.9, WIDTH),
    "of full support rank": steps((1.0, COUNT)),
    "rank-deficient": steps((3.0, 2), (1.0, 5)),
    "repeated": steps((5.0, 4), (2.0, 12), (1.0, 40), rest=0.5),
    "all but equal": steps((1.0, COUNT), rest=0.999),
    "zero": steps(),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_support_is_the_one_of_a_full_decomposition(spectrum):
    matrix = matrix_of(SPECTRA[spectrum])
    found = historical_support(matrix, COUNT, 8)
    rank = int((SPECTRA[spectrum] > WIDTH * 1.2e-7 * SPECTRA[spectrum].max()).sum())
    assert found.shape == (WIDTH, min(rank, COUNT)) and found.dtype == torch.float32
    expected, values = reference.support(matrix, found.shape[1])
    assert distance(found, expected) < 1e-6 if rank else not found.numel()
    rayleigh = (found.double().T @ matrix @ found.double()).diagonal()
    torch.testing.assert_close(rayleigh, values[: len(rayleigh)], rtol=1e-6, atol=1e-6 * float(values[0]))


@pytest.mark.parametrize("spectrum", ["random", "decaying", "decaying slowly", "flat"])
@pytest.mark.parametrize("rows", [60, 120, 200])
def test_bases_are_those_of_a_full_decomposition(spectrum, rows):
    statistic = matrix_of(SPECTRA[spectrum])
    values = SPECTRA[spectrum][: min(rows, WIDTH)].double().sqrt()
    gradient = rotation(rows, 1)[:, : len(values)] * values @ rotation(WIDTH, 2)[: len(values)]
    shared, residual = reference.bases(gradient, statistic, 1, 8, COUNT)
    found = allocate_layer(gradient, historical_support(statistic, COUNT, 8), 1, 8)
    assert max(distance(found[0], shared), distance(found[1], residual)) < 1e-6


def test_half_of_equal_eigenvalues_still_span_an_eigenspace():
    matrix = matrix_of(steps((5.0, 4), (2.0, 30), rest=0.5))
    values, vectors = top_eigenvectors(matrix, COUNT, "S")
    torch.testing.assert_close(matrix @ vectors, vectors * values, rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(COUNT).double(), rtol=0, atol=1e-12)
    assert values.tolist() == pytest.approx([5.0] * 4 + [2.0] * 12)


@pytest.mark.parametrize("rank", [0, 1, 3, 15, 16, 17])
def test_only_eigenvalues_above_the_floor_are_taken(rank):
    noise = matrix_of(1e-9 * torch.rand(WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 2)
    matrix = matrix_of(steps((1.0, rank))) + noise
    for floor in ({"absolute": 1e-6}, {"relative": 1e-6}) if rank else ({"absolute": 1e-6},):
        values, vectors = top_eigenvectors(matrix, COUNT, "S", **floor)
        assert vectors.shape == (WIDTH, min(rank, COUNT)) and len(values) == vectors.shape[1]
    assert top_eigenvectors(matrix, 0, "S")[1].shape == (WIDTH, 0)


@pytest.mark.parametrize("position", [0.999, 1.001])
def test_an_eigenvalue_at_the_floor_is_counted_right(position):
    matrix = matrix_of(steps((1.0, 1), (0.1, 4), (1e-4 * position, 1), rest=1e-6))
    assert top_eigenvectors(matrix, COUNT, "S", relative=1e-4)[1].shape[1] == (6 if position > 1 else 5)


def test_all_eigenpairs_come_by_default_and_in_descending_order():
    matrix = matrix_of(torch.linspace(-1.0, 2.0, WIDTH))
    values, vectors = eigh(matrix, "S")
    torch.testing.assert_close(values, torch.linspace(2.0, -1.0, WIDTH).double())
    torch.testing.assert_close(vectors * values @ vectors.T, matrix)


@pytest.mark.parametrize(("lowest", "refused"), [(-0.2, True), (-0.0101, True), (-0.0099, False), (-1e-7, False)])
def test_a_statistic_with_a_negative_eigenvalue_is_refused(lowest, refused):
    """The tolerance is 1 % of the largest entry, here 1; the eigenvalue hides in a direction that no axis shows."""
    matrix = torch.eye(WIDTH, dtype=torch.float64)
    hidden = torch.nn.functional.normalize(torch.ones(WIDTH - 1), dim=0).double()
    matrix[1:, 1:] -= (1 - lowest) * torch.outer(hidden, hidden)
    if refused:
        with pytest.raises(ValueError, match=f"fc1 has eigenvalue {lowest:.3g}: expected a positive semi-definite"):
            historical_support(matrix, COUNT, 8, "fc1")
    else:
        assert historical_support(matrix, COUNT, 8, "fc1").shape == (WIDTH, COUNT)


def test_only_the_pairs_that_are_wanted_are_computed(monkeypatch):
    calls, solve = [], linalg.eigh

    def counting(matrix, subset_by_index, **kwargs):
        calls.append(subset_by_index)
        return solve(matrix, subset_by_index=subset_by_index, **kwargs)

    monkeypatch.setattr(dulbe_peft.subspaces.decompositions.linalg, "eigh", counting)
    historical_support(matrix_of(SPECTRA["decaying"]), COUNT, 8)
    assert calls == [(WIDTH - COUNT, WIDTH - 1)]


def test_a_decomposition_that_fails_is_tried_another_way_and_then_names_the_matrix(monkeypatch):
    matrix = matrix_of(SPECTRA["decaying"])
    expected = historical_support(matrix, COUNT, 8)

    def failing(*_, **__):
        raise linalg.LinAlgError("did not converge")

    monkeypatch.setattr(dulbe_peft.subspaces.decompositions.linalg, "eigh", failing)
    assert distance(historical_support(matrix, COUNT, 8), expected) < 1e-6

    def failing_too(*_):
        raise torch.linalg.LinAlgError("nor did this")

    monkeypatch.setattr(torch.linalg, "eigh", failing_too)
    with pytest.raises(ValueError, match=r"block 3, shape \(120, 120\), failed: nor did this"):
        historical_support(matrix, COUNT, 8, name="block 3")


def test_asymmetry_is_the_largest_difference_wherever_it_is():
    matrix = torch.ones(70, 70)
    for i, j in ((0, 69), (69, 0), (33, 34), (40, 2)):
        skewed = matrix.clone()
        skewed[i, j] = 3.0
        assert asymmetry(skewed, rows=16) == 2.0
    assert asymmetry(matrix) == 0.0


def test_the_example_in_the_docstring():
    assert doctest.testmod(dulbe_peft.subspaces.decompositions) == (0, 2)
