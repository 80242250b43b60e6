import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import randn
from torch.nn import functional as F

from dulbe_peft.classifiers.geodesics import bridge_prototypes, reliability, slerp

few = settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


@few
@given(seed=seeds, fraction=st.floats(0, 1))
def test_slerp_equals_the_textbook_and_moves_at_equal_speed(seed, fraction):
    start, end = unit(8, seed=seed), unit(8, seed=seed + 1)
    found = slerp(start, end, fraction)
    torch.testing.assert_close(found.double(), reference.slerp(start, end, fraction), rtol=0, atol=2e-6)
    theta = math.acos(float(start.double() @ end.double()))
    half = ((start.double() - found.double()).norm() / 2).item()
    assert 2 * math.asin(min(1.0, half)) == pytest.approx(fraction * theta, abs=2e-6)


@few
@given(seed=seeds, exponent=st.floats(-12, -1), opposite=st.booleans(), fraction=st.floats(0, 1))
def test_slerp_is_of_unit_norm_for_nearly_parallel_and_nearly_opposite_vectors(seed, exponent, opposite, fraction):
    start = unit(8, seed=seed)
    end = F.normalize((-start if opposite else start) + 10**exponent * randn(8, seed=seed + 1), dim=0)
    found = slerp(start, end, fraction)
    assert found.norm().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(slerp(start, end, 0.0), start, rtol=0, atol=2e-6)
    torch.testing.assert_close(slerp(start, end, 1.0), end, rtol=0, atol=2e-6)
    theta = math.pi if opposite else 0.0
    half = min(1.0, ((start.double() - found.double()).norm() / 2).item())
    assert 2 * math.asin(half) == pytest.approx(fraction * theta, abs=20 * 10**exponent + 1e-3)


@pytest.mark.parametrize("index", range(5))
def test_slerp_between_exactly_opposite_vectors_follows_one_great_circle(index):
    start = torch.eye(4)[index] if index < 4 else unit(4)
    points = slerp(start, -start, torch.linspace(0, 1, 7)[:, None])
    assert points.isfinite().all()
    torch.testing.assert_close(points.norm(dim=1), torch.ones(7))
    torch.testing.assert_close(points @ start, torch.cos(torch.linspace(0, math.pi, 7)), rtol=0, atol=1e-6)
    assert torch.linalg.matrix_rank(points, atol=1e-4) == 2


def test_slerp_broadcasts():
    start, end = unit(5, 8), unit(5, 8, seed=1)
    depths = torch.linspace(0, 1, 4)
    grid = slerp(start[:, None], end[:, None], depths[:, None])
    assert grid.shape == (5, 4, 8)
    for k, depth in enumerate(depths.tolist()):
        torch.testing.assert_close(grid[:, k], slerp(start, end, depth))
    torch.testing.assert_close(grid, bridge_prototypes(start, end, depths))


def test_slerp_takes_half_precision(dtype=torch.bfloat16):
    start, end = unit(5, 64).to(dtype), unit(5, 64, seed=1).to(dtype)
    found = slerp(start, end, 0.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float().norm(dim=1), torch.ones(5), rtol=0, atol=5e-3)
    assert slerp(start, start, 0.5).isfinite().all() and slerp(start, -start, 0.5).isfinite().all()
    assert slerp(start.double(), end.double(), 0.5).dtype == torch.float64


def test_slerp_refuses_other_vectors():
    with pytest.raises(ValueError, match="same d"):
        slerp(unit(4), unit(5), 0.5)
    for fraction in (-1e-3, 1.001, float("nan"), torch.tensor([[0.5], [2.0]])):
        with pytest.raises(ValueError, match=r"fraction must lie in \[0, 1\]"):
            slerp(unit(2, 4), unit(2, 4, seed=1), fraction)
    with pytest.raises(ValueError, match="unsqueeze"):
        slerp(unit(3, 4), unit(3, 4, seed=1), torch.rand(3))
    for bad in (torch.zeros(4), 2 * unit(4), torch.full((4,), float("nan"))):
        with pytest.raises(ValueError, match="end must hold finite unit vectors"):
            slerp(unit(4), bad, 0.5)
    with pytest.raises(TypeError, match="floating-point"):
        slerp(torch.tensor([1, 0]), torch.tensor([0, 1]), 0.5)


@pytest.mark.parametrize("chunk_elements", [1, 16, 2**24])
def test_reliability_is_the_mean_probability_of_the_own_class(chunk_elements):
    bridges = bridge_prototypes(unit(5, 8), unit(5, 8, seed=1), torch.linspace(0, 1, 3))
    images, labels = unit(17, 8, seed=2), 2 + torch.arange(17) % 3
    found = reliability(images, labels, bridges, 20.0, first_class=2, chunk_elements=chunk_elements)
    for c in range(2, 5):
        for k in range(3):
            own = [row for row, label in zip(images, labels.tolist(), strict=True) if label == c]
            expected = [reference.softmax((20.0 * bridges[:, k] @ row).tolist())[c] for row in own]
            assert found[c - 2, k].item() == pytest.approx(sum(expected) / len(expected), rel=1e-4)
