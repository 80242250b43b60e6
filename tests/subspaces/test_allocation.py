"""Supports and bases compared with a full decomposition in float64, for many spectra and gradients."""

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import randn
from scipy import linalg

import dulbe_peft.subspaces.decompositions
from dulbe_peft import DualModeLoraConfig
from dulbe_peft.subspaces.allocation import allocate_layer, allocate_modes, historical_support
from dulbe_peft.subspaces.decompositions import orthonormal_complement
from dulbe_peft.subspaces.occupation import OccupationStatistics

WIDTH, COUNT = 120, 16


def matrix_of(values):
    axes = torch.linalg.qr(randn(WIDTH, WIDTH, dtype=torch.float64)).Q
    return axes * torch.as_tensor(values, dtype=torch.float64) @ axes.T


def steps(*levels, rest=0.0):
    """Return a spectrum from pairs (value, multiplicity), filled up with `rest` to 120 values."""
    values = [value for value, times in levels for _ in range(times)]
    return torch.tensor(values + [rest] * (WIDTH - len(values)), dtype=torch.float64)


def tokens(width, seed=0):
    """Return tokens with a decaying spectrum, so that the top eigenvectors are well separated."""
    return randn(200, width, seed=seed) * torch.logspace(0, -1, width)


def statistic(width, seed=0):
    return tokens(width, seed).T @ tokens(width, seed)


def distance(basis, expected):
    """Return the spectral norm of the difference between the projectors onto two subspaces."""
    basis, expected = basis.double(), expected.double()
    return float(torch.linalg.matrix_norm(basis @ basis.T - expected @ expected.T, 2))


def assert_orthonormal(*bases):
    stacked = torch.cat(bases, dim=1).double()
    gap = (stacked.T @ stacked - torch.eye(stacked.shape[1], dtype=torch.float64)).abs()
    assert gap.numel() == 0 or gap.max() < 2e-6


def energy(gradient, basis):
    return (gradient.double() @ basis.double()).square().sum().item()


SPECTRA = {
    "random": torch.linalg.svdvals(randn(200, WIDTH, seed=3, dtype=torch.float64)).square(),
    "decaying": 0.7 ** torch.arange(WIDTH),
    "decaying slowly": 1.0 / torch.arange(1, WIDTH + 1),
    "far apart": torch.logspace(30, -8, WIDTH, dtype=torch.float64),
    "flat": torch.linspace(1.0, 0.9, WIDTH),
    "full support rank": steps((1.0, COUNT)),
    "rank-deficient": steps((3.0, 2), (1.0, 5)),
    "repeated": steps((5.0, 4), (2.0, 12), (1.0, 40), rest=0.5),
    "nearly equal": steps((1.0, COUNT), rest=0.999),
    "zero": steps(),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_support_equals_full_decomposition(spectrum):
    matrix = matrix_of(SPECTRA[spectrum])
    support = historical_support(matrix, COUNT, 8)
    rank = int((SPECTRA[spectrum] > WIDTH * 1.2e-7 * SPECTRA[spectrum].max()).sum())
    assert support.shape == (WIDTH, min(rank, COUNT)) and support.dtype == torch.float32
    expected, values = reference.support(matrix, support.shape[1])
    assert distance(support, expected) < 1e-6 if rank else not support.numel()
    rayleigh = (support.double().T @ matrix @ support.double()).diagonal()
    torch.testing.assert_close(rayleigh, values[: len(rayleigh)], rtol=1e-6, atol=1e-6 * float(values[0]))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rank=st.sampled_from([0, 1, 2, 5, 9]),
    shared_rank=st.integers(0, 3),
    residual_rank=st.integers(0, 4),
    support_rank=st.integers(0, 12),
)
def test_bases_satisfy_the_identities_of_the_paper(seed, rank, shared_rank, residual_rank, support_rank):
    """Cover gradients that have a low rank or are zero, and supports with fewer than r_S directions."""
    gradient = randn(9, 12, seed=seed) if rank == 9 else randn(9, rank, seed=seed) @ randn(rank, 12, seed=seed + 2)
    matrix = statistic(12, seed=seed + 1)
    occupied = historical_support(matrix, support_rank, residual_rank)
    shared, residual = allocate_layer(gradient, occupied, shared_rank, residual_rank)
    kept = occupied.shape[1]
    assert kept == min(support_rank, 12 - residual_rank)
    assert shared.shape == (12, shared_rank) and residual.shape == (12, residual_rank)
    assert_orthonormal(shared, residual)
    assert_orthonormal(occupied, residual)
    again = allocate_layer(gradient, occupied, shared_rank, residual_rank)
    assert torch.equal(again[0], shared) and torch.equal(again[1], residual)
    inside = min(kept, shared_rank)
    torch.testing.assert_close(occupied @ (occupied.T @ shared[:, :inside]), shared[:, :inside], rtol=0, atol=1e-6)
    response = gradient.double() @ occupied.double()
    top = torch.linalg.eigvalsh(response.T @ response).flip(0)[:inside].sum().item()
    assert energy(gradient, shared[:, :inside]) == pytest.approx(top, rel=1e-5, abs=1e-9)
    squares = torch.linalg.svdvals(gradient.double() - response @ occupied.double().T).square()
    assert energy(gradient, residual) == pytest.approx(squares[:residual_rank].sum().item(), rel=1e-5, abs=1e-9)
    completed = squares[residual_rank : residual_rank + shared_rank - inside].sum().item()
    assert energy(gradient, shared[:, inside:]) == pytest.approx(completed, rel=1e-4, abs=1e-9)
    _, values = reference.support(matrix, 12)
    if residual_rank and kept < 12:
        worst = torch.linalg.eigvalsh(residual.double().T @ matrix.double() @ residual.double()).max()
        assert worst <= values[kept] + 1e-5 * values[0]


@pytest.mark.parametrize("faint", [0.0, 1.0])
def test_residual_basis_avoids_support_despite_rounding_and_faint_gradients(faint):
    occupied = historical_support(statistic(20), 7, 6)
    exact = torch.linalg.qr(occupied.double()).Q
    beyond = torch.linalg.qr((torch.eye(20) - exact @ exact.T) @ randn(20, 20, dtype=torch.float64)).Q
    outside = randn(40, 6, dtype=torch.float64) * torch.logspace(-1, -7, 6) @ beyond[:, :6].T
    gradient = randn(40, 7, dtype=torch.float64) @ exact.T + faint * outside
    shared, residual = allocate_layer(gradient, occupied, 1, 6)
    assert_orthonormal(shared, residual)
    assert_orthonormal(occupied, residual)


@pytest.mark.parametrize(("scale", "dtype"), [(1e-30, torch.float32), (-1.0, torch.float64), (1.0, torch.bfloat16)])
def test_bases_are_float32_and_independent_of_scale_and_sign(scale, dtype):
    gradient, occupied = randn(9, 12).to(dtype), historical_support(statistic(12), 4, 3)
    expected, scaled = allocate_layer(gradient, occupied, 1, 3), allocate_layer(gradient * scale, -occupied, 1, 3)
    for basis, expected_basis in zip(scaled, expected, strict=True):
        assert basis.dtype == torch.float32
        torch.testing.assert_close(basis, expected_basis, rtol=0, atol=1e-5)
        assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.fixture
def probe():
    return {"k": randn(10, 12), "v": randn(15, 12, seed=1), "fc2": randn(12, 20, seed=2)}


@pytest.fixture
def stats():
    stats = OccupationStatistics()
    stats.update(("k", "v"), tokens(12))
    stats.update("fc2", tokens(20, seed=1))
    return stats


@pytest.mark.parametrize("ranks", [(1, 4, 5), (2, 3, 6), (0, 4, 3), (3, 0, 4)])
def test_modes_equal_the_reference(probe, stats, ranks):
    modes = allocate_modes(probe, stats, *ranks)
    assert list(modes) == list(probe)
    for name, gradient in probe.items():
        shared, residual = reference.bases(gradient, stats[name], *ranks)
        planned = modes[name]
        assert max(distance(planned.shared, shared), distance(planned.residual, residual)) < 1e-6
        assert planned.shared.dtype == planned.residual.dtype == torch.float32
        assert planned.support_rank == ranks[2]
        whole = gradient.double().square().sum().item()
        assert planned.shared_capture == pytest.approx(energy(gradient, shared) / whole, rel=1e-4)
        assert planned.residual_capture == pytest.approx(energy(gradient, residual) / whole, rel=1e-4)


def test_ranks_default_to_the_configuration(probe, stats):
    config = DualModeLoraConfig(shared_rank=2, residual_rank=3, support_rank=5, rank_pattern={"fc2": 4})
    for overrides in ({}, {"support_rank": 6, "shared_rank": 1}):
        modes = allocate_modes(probe, stats, config=config, **overrides)
        ranks = {"shared_rank": 2, "support_rank": 5} | overrides
        for name, planned in modes.items():
            assert planned.shared.shape[1] == ranks["shared_rank"] and planned.support_rank == ranks["support_rank"]
            assert planned.residual.shape[1] == (4 if name == "fc2" else 3)
    plain = allocate_modes({"fc2": randn(5, 20)}, None)["fc2"]
    assert (plain.shared.shape[1], plain.residual.shape[1]) == (1, 8)


@pytest.mark.parametrize("partial", [None, {}, {"fc2": torch.eye(20), "elsewhere": torch.eye(3)}])
def test_layer_without_statistics_is_planned_as_in_first_task(probe, partial):
    modes = allocate_modes(probe, partial, shared_rank=2, residual_rank=3)
    for name in ("k", "v"):
        shared, residual = reference.first_task_bases(probe[name], 2, 3)
        assert max(distance(modes[name].shared, shared), distance(modes[name].residual, residual)) < 1e-6
        assert modes[name].support_rank == 0
    assert modes["fc2"].support_rank == (17 if partial else 0)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"shared_rank": -1}, ValueError, "shared_rank must be at least 0, got -1"),
        ({"residual_rank": 12}, ValueError, "= 13 of layer 'k' must be from 1 to its 12 input"),
        ({"grad_probe": {"v": randn(12)}}, ValueError, "gradient of layer 'v' must be a matrix"),
        ({"stats": {"v": torch.eye(12) * float("nan")}}, ValueError, "statistic of layer 'v' holds NaN or infinity"),
        (
            {"grad_probe": {"v": randn(3, 12) * float("inf")}},
            ValueError,
            "gradient of layer 'v' holds NaN or infinity",
        ),
        ({"stats": {"v": torch.eye(11)}}, ValueError, "statistic of layer 'v' must be (12, 12)"),
        (
            {"grad_probe": [randn(3, 12)]},
            TypeError,
            "grad_probe must be a mapping of layer names to matrices, got a list",
        ),
        ({"grad_probe": {"v": [1.0]}}, ValueError, "gradient of layer 'v' must be a matrix"),
        ({"stats": [torch.eye(12)]}, TypeError, "stats must be a mapping"),
    ],
)
def test_errors_name_the_layer(probe, stats, kwargs, error, message):
    with pytest.raises(error) as raised:
        allocate_modes(**{"grad_probe": probe, "stats": stats, **kwargs})
    assert message in str(raised.value)


def test_failed_decomposition_is_retried_then_error_names_the_matrix(monkeypatch):
    matrix = matrix_of(SPECTRA["decaying"])
    expected = historical_support(matrix, COUNT, 8)
    with pytest.raises(ValueError, match="do not fit"):
        orthonormal_complement(expected, WIDTH)

    def failing(*_, **__):
        raise linalg.LinAlgError("did not converge")

    monkeypatch.setattr(dulbe_peft.subspaces.decompositions.linalg, "eigh", failing)
    assert distance(historical_support(matrix, COUNT, 8), expected) < 1e-6

    def failing_too(*_):
        raise torch.linalg.LinAlgError("nor did this")

    monkeypatch.setattr(torch.linalg, "eigh", failing_too)
    with pytest.raises(ValueError, match=r"block 3, shape \(120, 120\), failed: nor did this"):
        historical_support(matrix, COUNT, 8, name="block 3")
