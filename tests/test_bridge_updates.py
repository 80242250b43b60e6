"""Further images of classes that the bridge ensemble knows, against a literal float64 reading of the rule."""

from __future__ import annotations

import math

import pytest
import reference
import torch

from dulbe_peft import BridgeEnsembleHead

DIM, SCALE, BETA = 8, 20.0, 0.05


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CENTRES = randn(5, DIM, seed=100)
TEXTS = randn(5, DIM, seed=1)


def photos(classes, each, seed):
    labels = torch.arange(len(classes)).repeat_interleave(each)
    return CENTRES[classes][labels] + 0.7 * randn(len(labels), DIM, seed=seed), labels


def make_head():
    head = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=SCALE, reliability_temperature=BETA)
    head.add_classes(["ant", "bee", "cat"], *photos([0, 1, 2], 6, 2), TEXTS[:3])
    head.add_classes(["dog", "eel"], *photos([3, 4], 5, 3), TEXTS)
    return head


def literal_rho(images, own, visual, texts, depths):
    """rho of the class `own` at each depth over all classes, image by image, in float64."""
    rho = []
    for depth in depths:
        bridges = [reference.slerp(v, e, depth) for v, e in zip(visual, texts, strict=True)]
        each = [reference.softmax([float(SCALE * z @ b) for b in bridges])[own] for z in images]
        rho.append(sum(each) / len(each))
    return rho


def test_prototypes_are_those_of_all_images_at_once():
    images, labels = photos([0, 1, 2], 20, 7)
    early, late = labels.new_zeros(60, dtype=torch.bool), BridgeEnsembleHead(DIM, num_depths=4, logit_scale=SCALE)
    early[::3] = True
    late.add_classes(["a", "b", "c"], images[early], labels[early], TEXTS[:3])
    for rows in (~early).nonzero()[:, 0].split(7):
        late.update_classes(images[rows], labels[rows])
    units = reference.unit(images)
    for row in range(3):
        total = units[labels == row].sum(dim=0)
        torch.testing.assert_close(late.visual_prototypes[row].double(), total / total.norm(), rtol=0, atol=3e-7)
        assert float(late.lengths[row]) == pytest.approx(float(total.norm()), rel=1e-6)
    assert late.counts.tolist() == [20, 20, 20]


def test_reliability_is_the_weighted_mean_of_the_old_and_the_new_measurement():
    head = make_head()
    old, depths = head.reliability.double(), head.depths.tolist()
    images, labels = photos([1, 4], 7, 9)
    labels = torch.tensor([1, 4])[labels]
    head.update_classes(images, labels)
    units, texts = reference.unit(images), reference.unit(TEXTS)
    visual = head.visual_prototypes.double()
    for row, count in ((1, 6), (4, 5)):
        rho = literal_rho(units[labels == row], row, visual, texts, depths)
        weights = reference.softmax(
            [(count * math.log(p) + 7 * r / BETA) / (count + 7) for p, r in zip(old[row].tolist(), rho, strict=True)]
        )
        torch.testing.assert_close(head.reliability[row].tolist(), weights, rtol=0, atol=1e-4)
    assert torch.equal(head.reliability[[0, 2, 3]].double(), old[[0, 2, 3]]), "other classes stay as they are"


@pytest.mark.parametrize("beta", [1e-4, 1e-40, 1e-300])
def test_a_depth_without_weight_does_not_become_nan(beta):
    head = BridgeEnsembleHead(DIM, num_depths=4, logit_scale=SCALE, reliability_temperature=beta)
    head.add_classes(["a", "b", "c"], *photos([0, 1, 2], 6, 2), TEXTS[:3])
    assert (head.reliability == 0).any()
    head.update_classes(*photos([0, 1, 2], 6, 3))
    torch.testing.assert_close(head.reliability.sum(dim=1), torch.ones(3))


def test_moving_keeps_the_weight_of_old_images_and_forgetting_drops_it():
    head = make_head()
    turn = torch.linalg.qr(randn(DIM, DIM, seed=5)).Q
    lengths = head.lengths.clone()
    head.move(turn)
    assert torch.equal(head.lengths, lengths) and head.counts.tolist() == [6, 6, 6, 5, 5]
    images, labels = photos([3], 9, 6)
    head.update_classes(images @ turn, labels + 3)
    total = (reference.unit(torch.cat([photos([3, 4], 5, 3)[0][:5], images])) @ turn.double()).sum(dim=0)
    torch.testing.assert_close(head.visual_prototypes[3].double(), total / total.norm(), rtol=0, atol=1e-6)
    head.forget_class("bee")
    assert head.counts.tolist() == [6, 6, 14, 5] and len(head.lengths) == 4
