import pytest
import reference
import torch

from dulbe_peft.subspaces.allocation import allocate_modes
from dulbe_peft.subspaces.occupation import OccupationStatistics


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(width, count=100, seed=0):
    return randn(count, width, seed=seed) * torch.logspace(0, -1, width)


@pytest.fixture
def probe():
    return {"k": randn(10, 12), "v": randn(10, 12, seed=1), "fc2": randn(12, 20, seed=2)}


@pytest.fixture
def stats():
    stats = OccupationStatistics()
    stats.update(("k", "v"), tokens(12))
    stats.update("fc2", tokens(20, seed=1))
    return stats


def energy(gradient, basis):
    return ((gradient @ basis).square().sum() / gradient.square().sum()).item()


def assert_same_span(found, expected, atol=1e-5):
    found, expected = found.double(), expected.double()
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=atol)


@pytest.mark.parametrize("ranks", [(1, 4, 5), (2, 3, 6), (0, 4, 3), (3, 0, 4)])
def test_modes_equal_the_reference(probe, stats, ranks):
    modes = allocate_modes(probe, stats, *ranks)
    assert list(modes) == list(probe)
    for name, gradient in probe.items():
        shared, residual = reference.bases(gradient, stats[name], *ranks)
        found = modes[name]
        assert_same_span(found.shared, shared)
        assert_same_span(found.residual, residual)
        assert found.shared.dtype == found.residual.dtype == torch.float32
        assert found.support_rank == ranks[2]
        assert found.shared_capture == pytest.approx(energy(gradient.double(), shared), rel=1e-4)
        assert found.residual_capture == pytest.approx(energy(gradient.double(), residual), rel=1e-4)


@pytest.mark.parametrize("partial", [None, {}, {"fc2": torch.eye(20), "elsewhere": torch.eye(3)}])
def test_a_layer_without_statistics_is_planned_as_at_the_first_task(probe, partial):
    modes = allocate_modes(probe, partial, shared_rank=2, residual_rank=3)
    for name in ("k", "v"):
        shared, residual = reference.first_task_bases(probe[name], 2, 3)
        assert_same_span(modes[name].shared, shared)
        assert_same_span(modes[name].residual, residual)
        assert modes[name].support_rank == 0
    assert modes["fc2"].support_rank == (17 if partial else 0)


def test_degenerate_gradients_and_statistics_still_get_bases():
    few = OccupationStatistics()
    few.update("a", tokens(12, count=1))
    for gradient, statistics in ((torch.zeros(10, 12), None), (torch.zeros(10, 12), few), (randn(10, 12), few)):
        found = allocate_modes({"a": gradient}, statistics, shared_rank=2, residual_rank=4)["a"]
        assert found.support_rank == (statistics is few)
        assert (found.shared_capture + found.residual_capture > 0) == gradient.any().item()
        stacked = torch.cat([found.shared, found.residual], dim=1)
        torch.testing.assert_close(stacked.T @ stacked, torch.eye(6), rtol=0, atol=1e-6)
        if statistics is few:
            assert (tokens(12, count=1) @ found.residual).abs().max() < 1e-5


def test_allocation_is_pure(probe, stats):
    probe["k"].requires_grad_()
    before = {name: gradient.detach().clone() for name, gradient in probe.items()}
    matrices = {name: matrix.clone() for name, matrix in stats.items()}
    first, second = allocate_modes(probe, stats), allocate_modes(probe, stats)
    assert all(torch.equal(probe[name], before[name]) and torch.equal(stats[name], matrices[name]) for name in probe)
    assert all(torch.equal(first[name].residual, second[name].residual) for name in probe)
    assert not first["k"].shared.requires_grad and probe["k"].grad is None


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"shared_rank": -1}, ValueError, "shared_rank must be at least 0, got -1"),
        ({"residual_rank": 1.0}, TypeError, "residual_rank must be an int, got 1.0"),
        ({"shared_rank": 0, "residual_rank": 0}, ValueError, "= 0 of layer 'k' must be from 1 to"),
        ({"residual_rank": 12}, ValueError, "= 13 of layer 'k' must be from 1 to its 12 input"),
        ({"probe": {"v": randn(12)}}, ValueError, "gradient of layer 'v' must be a matrix"),
        ({"probe": {"v": randn(3, 12) * float("inf")}}, ValueError, "gradient of layer 'v' holds NaN or infinity"),
        ({"stats": {"v": torch.eye(11)}}, ValueError, "statistic of layer 'v' must be (12, 12)"),
        ({"stats": {"v": torch.eye(12) * float("nan")}}, ValueError, "statistic of layer 'v' holds NaN or infinity"),
    ],
)
def test_errors_name_the_layer(probe, stats, kwargs, error, message):
    with pytest.raises(error) as raised:
        allocate_modes(**{"probe": probe, "stats": stats, **kwargs})
    assert message in str(raised.value)
