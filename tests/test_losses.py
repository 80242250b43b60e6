"""The losses against explicit sums in float64."""

import math

import pytest
import reference
import torch
from reference import randn
from torch.nn import functional as F

from dulbe_peft.strategies.losses import bidirectional_kl, cross_modal_loss


def unit(*shape, seed=0):
    return F.normalize(randn(*shape, seed=seed), dim=-1)


@pytest.mark.parametrize("temperatures", [(5.0, 0.1), (1.0, 1.0), (2.0, 4.0)])
def test_bidirectional_kl_equals_explicit_sums(temperatures):
    student, teacher = randn(6, 4), randn(6, 4, seed=1)
    by_class, by_instance = reference.bidirectional_kl(student, teacher, *temperatures)
    mean = bidirectional_kl(student, teacher, *temperatures).item()
    assert mean == pytest.approx(by_class / 6 + by_instance / 4, rel=1e-4)
    batchmean = bidirectional_kl(student, teacher, *temperatures, reduction="batchmean").item()
    assert batchmean == pytest.approx((by_class + by_instance) / 6, rel=1e-4)


def test_kl_is_finite_for_sharp_logits_and_reaches_the_student_alone():
    teacher = (100 * unit(32, 16) @ unit(8, 16, seed=1).T).requires_grad_()
    student = (100 * unit(32, 16, seed=2) @ unit(8, 16, seed=1).T).requires_grad_()
    loss = bidirectional_kl(student, teacher)
    loss.backward()
    assert loss.isfinite() and loss > 0 and student.grad.isfinite().all() and student.grad.abs().sum() > 0
    assert teacher.grad is None
    assert bidirectional_kl(teacher, teacher).item() == pytest.approx(0, abs=1e-6)
    half = bidirectional_kl(student.half(), teacher.half())
    assert half.dtype == torch.float32 and half.isfinite()


def test_cross_modal_loss_takes_tau_itself():
    images, texts, labels = unit(5, 8), unit(3, 8, seed=1), torch.tensor([0, 1, 2, 1, 0])
    expected = 0.0
    for row, label in zip(images, labels.tolist(), strict=True):
        expected -= math.log(reference.softmax((100.0 * texts @ row).double().tolist())[label]) / 5
    assert cross_modal_loss(images, texts, labels, 100.0).item() == pytest.approx(expected, rel=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = cross_modal_loss(images, texts, labels.int(), torch.tensor(100.0))
    assert inside.item() == pytest.approx(expected, rel=1e-4)
    assert cross_modal_loss(images.half(), texts.half(), labels, 100.0).dtype == torch.float32


def test_what_does_not_fit_is_refused():
    images, texts, labels, ones = unit(5, 8), unit(3, 8, seed=1), torch.tensor([0, 1, 2, 1, 0]), torch.ones(3, 4)
    for call, message in (
        (lambda: cross_modal_loss(images, texts[:, :4], labels, 100.0), "image_embeds and text_embeds"),
        (lambda: cross_modal_loss(images, texts, labels[:4], 100.0), "labels must be"),
        (lambda: bidirectional_kl(ones, ones, class_temperature=0.0), "class_temperature"),
        (lambda: cross_modal_loss(images, texts, labels + 1, 100.0), "label 3 is out of range for 3 classes"),
        (lambda: bidirectional_kl(ones, torch.ones(3, 5)), r"\(3, 4\) and \(3, 5\)"),
        (lambda: bidirectional_kl(ones, ones, reduction="sum"), "'sum'"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
