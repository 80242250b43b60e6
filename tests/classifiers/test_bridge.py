"""Compare the bridge classifier and its geodesics with literal loops."""

import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import randn
from torch.nn import functional as F

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.geodesics import bridge_prototypes, reliability, slerp

DIM, SCALE, BETA, CLASSES = 8, 20.0, 0.05, 5
DEPTHS = [0.0, 1 / 3, 2 / 3, 1.0]


CENTRES, TESTS = randn(CLASSES, DIM, seed=100), randn(20, DIM, seed=9)
TEXTS = CENTRES + 0.8 * randn(CLASSES, DIM, seed=1)


def photos(classes, each, seed, spread=0.7):
    labels = torch.arange(len(classes)).repeat_interleave(each)
    return CENTRES[classes][labels] + spread * randn(len(labels), DIM, seed=seed), labels


def make_head(**settings):
    """Return a head that has learned two tasks, of three and of two classes."""
    head = BridgeEnsembleHead(DIM, **{"num_depths": 4, "logit_scale": SCALE, **settings})
    head.add_classes(["ant", "bee", "cat"], *photos([0, 1, 2], 6, 2), TEXTS[:3])
    head.add_classes(["dog", "eel"], *photos([3, 4], 5, 3), TEXTS)
    return head


def test_head_equals_the_reference_over_two_tasks():
    head, literal = make_head(), reference.Head(DEPTHS, logit_scale=SCALE)
    for task, count in ((photos([0, 1, 2], 6, 2), 3), (photos([3, 4], 5, 3), 5)):
        literal.add_classes(task[0], task[1].tolist(), TEXTS[:count])
    torch.testing.assert_close(head.visual_prototypes.double(), torch.stack(literal.visual), rtol=0, atol=1e-5)
    torch.testing.assert_close(head.reliability.double(), torch.tensor(literal.weights).double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(head(TESTS).double(), literal.logits(TESTS), rtol=0, atol=5e-3)
    expected = [sum(w * a for w, a in zip(row, literal.depths, strict=True)) for row in literal.weights]
    torch.testing.assert_close(head.expected_depth().tolist(), expected, rtol=0, atol=1e-4)
    scales = torch.logspace(-30, 30, 20)[:, None]
    torch.testing.assert_close(head(TESTS * scales), head(TESTS), rtol=0, atol=1e-4)


def test_depths_can_be_given():
    assert torch.equal(BridgeEnsembleHead(DIM).depths, torch.linspace(0, 1, 10))
    head = make_head(depths=[0.5])
    assert torch.equal(head.reliability, torch.ones(5, 1))
    torch.testing.assert_close(head.ensemble_prototypes, slerp(head.visual_prototypes, head.text_embeds, 0.5))
    for wrong in ({"depths": []}, {"depths": [math.nan]}, {"logit_scale": 1e300}):
        with pytest.raises(ValueError, match="(depths|logit_scale) must (be|have)"):
            BridgeEnsembleHead(DIM, **wrong)
    by_place = BridgeEnsembleHead(DIM, 3, torch.tensor([0.25, 0.5]), 0.1, logit_scale=9)
    assert by_place.settings() == {"depths": [0.25, 0.5], "reliability_temperature": 0.1}
    assert by_place.num_depths == 2 and by_place.logit_scale == 9.0
    assert "embed_dim=8, depths=[0.25, 0.5], reliability_temperature=0.1, classes=0" in repr(by_place)


def test_ensemble_prototypes_follow_every_change_of_the_state():
    head, other = make_head(), BridgeEnsembleHead(DIM, num_depths=4)
    first = head.ensemble_prototypes
    other.add_classes(["x"], *photos([0], 3, 4), TEXTS[:1])
    assert other.ensemble_prototypes.shape == (1, DIM) and head.ensemble_prototypes is first
    torch.nn.ModuleDict({"head": other}).load_state_dict({f"head.{k}": v for k, v in head.state_dict().items()})
    assert torch.equal(other.ensemble_prototypes, first)
    head.half()
    assert head.visual_prototypes.dtype == torch.float16 and head.ensemble_prototypes is not first
    torch.testing.assert_close(head.ensemble_prototypes, first, rtol=0, atol=5e-3)


def test_reliability_is_the_weighted_mean_of_the_old_and_the_new_measurement():
    head = make_head()
    old = head.reliability.double()
    images, labels = photos([1, 4], 7, 9)
    labels = torch.tensor([1, 4])[labels]
    head.update_classes(images, labels)
    units, literal = reference.unit(images), reference.Head(DEPTHS, logit_scale=SCALE)
    literal.visual, literal.text = head.visual_prototypes.double(), reference.unit(TEXTS)
    for row, count in ((1, 6), (4, 5)):
        rho = literal.rho(units[labels == row], row)
        weights = reference.softmax(
            [(count * math.log(p) + 7 * r / BETA) / (count + 7) for p, r in zip(old[row].tolist(), rho, strict=True)]
        )
        torch.testing.assert_close(head.reliability[row].tolist(), weights, rtol=0, atol=1e-4)
    assert torch.equal(head.reliability[[0, 2, 3]].double(), old[[0, 2, 3]]), "other classes do not change"


@pytest.mark.parametrize("beta", [1e-4, 1e-40, 1e-300])
def test_depth_with_zero_weight_does_not_become_nan(beta):
    head = make_head(reliability_temperature=beta)
    assert (head.reliability == 0).any()
    head.update_classes(*photos([0, 1, 2], 6, 3))
    torch.testing.assert_close(head.reliability.sum(dim=1), torch.ones(5))


def test_moving_keeps_the_weight_of_old_images_and_forgetting_drops_it():
    head, turn = make_head(), torch.linalg.qr(randn(DIM, DIM, seed=5)).Q
    head.move(turn)
    images, labels = photos([3], 9, 6)
    for rows in (slice(0, 4), slice(4, 9)):
        head.update_classes(images[rows] @ turn, labels[rows] + 3)
    total = (reference.unit(torch.cat([photos([3, 4], 5, 3)[0][:5], images])) @ turn.double()).sum(dim=0)
    torch.testing.assert_close(head.visual_prototypes[3].double(), total / total.norm(), rtol=0, atol=1e-6)
    head.forget_class("bee")
    assert head.counts.tolist() == [6, 6, 14, 5] and len(head.lengths) == 4


few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


@few
@given(seed=seeds, fraction=st.floats(0, 1))
def test_slerp_equals_the_textbook_formula_at_constant_speed(seed, fraction):
    start, end = unit(8, seed=seed), unit(8, seed=seed + 1)
    actual = slerp(start, end, fraction)
    torch.testing.assert_close(actual.double(), reference.slerp(start, end, fraction), rtol=0, atol=2e-6)
    theta = math.acos(float(start.double() @ end.double()))
    half = ((start.double() - actual.double()).norm() / 2).item()
    assert 2 * math.asin(min(1.0, half)) == pytest.approx(fraction * theta, abs=2e-6)


@few
@given(seed=seeds, exponent=st.floats(-12, -1), opposite=st.booleans(), fraction=st.floats(0, 1))
def test_slerp_has_unit_norm_for_nearly_parallel_and_nearly_opposite_vectors(seed, exponent, opposite, fraction):
    start = unit(8, seed=seed)
    end = F.normalize((-start if opposite else start) + 10**exponent * randn(8, seed=seed + 1), dim=0)
    actual = slerp(start, end, fraction)
    assert actual.norm().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(slerp(start, end, 0.0), start, rtol=0, atol=2e-6)
    torch.testing.assert_close(slerp(start, end, 1.0), end, rtol=0, atol=2e-6)
    theta = math.pi if opposite else 0.0
    half = min(1.0, ((start.double() - actual.double()).norm() / 2).item())
    assert 2 * math.asin(half) == pytest.approx(fraction * theta, abs=20 * 10**exponent + 1e-3)


@pytest.mark.parametrize("index", range(5))
def test_slerp_between_exactly_opposite_vectors_follows_one_great_circle(index):
    start = torch.eye(4)[index] if index < 4 else unit(4)
    points = slerp(start, -start, torch.linspace(0, 1, 7)[:, None])
    assert points.isfinite().all()
    torch.testing.assert_close(points.norm(dim=1), torch.ones(7))
    torch.testing.assert_close(points @ start, torch.cos(torch.linspace(0, math.pi, 7)), rtol=0, atol=1e-6)
    assert torch.linalg.matrix_rank(points, atol=1e-4) == 2


def test_slerp_accepts_half_precision(dtype=torch.bfloat16):
    start, end = unit(5, 64).to(dtype), unit(5, 64, seed=1).to(dtype)
    actual = slerp(start, end, 0.5)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float().norm(dim=1), torch.ones(5), rtol=0, atol=5e-3)
    assert slerp(start, start, 0.5).isfinite().all() and slerp(start, -start, 0.5).isfinite().all()
    assert slerp(start.double(), end.double(), 0.5).dtype == torch.float64


def test_slerp_refuses_invalid_vectors_and_fractions():
    with pytest.raises(ValueError, match="same d"):
        slerp(unit(4), unit(5), 0.5)
    for fraction in (-1e-3, 1.001, float("nan"), torch.tensor([[0.5], [2.0]])):
        with pytest.raises(ValueError, match=r"fraction must lie in \[0, 1\]"):
            slerp(unit(2, 4), unit(2, 4, seed=1), fraction)
    with pytest.raises(ValueError, match="unsqueeze"):
        slerp(unit(3, 4), unit(3, 4, seed=1), torch.rand(3))
    for bad in (torch.zeros(4), 2 * unit(4), torch.full((4,), float("nan"))):
        with pytest.raises(ValueError, match="end must be finite unit vectors"):
            slerp(unit(4), bad, 0.5)
    with pytest.raises(TypeError, match="floating-point"):
        slerp(torch.tensor([1, 0]), torch.tensor([0, 1]), 0.5)


def test_reliability_does_not_depend_on_the_chunk_size():
    bridges = bridge_prototypes(unit(5, 8), unit(5, 8, seed=1), torch.linspace(0, 1, 3))
    images, labels = unit(17, 8, seed=2), 2 + torch.arange(17) % 3
    whole, *parts = (reliability(images, labels, bridges, 20.0, 2, chunk_elements=most) for most in (2**24, 1, 16))
    for actual in parts:
        torch.testing.assert_close(actual, whole, rtol=1e-5, atol=0)
