"""Scores of learned images as if they had not been learned, against classifiers that did not learn them."""

import pytest
import torch
from taught import clusters, in_tasks
from torch.nn import functional as F

from dulbe_peft.training.estimating import left_out_share

DIM, COUNTS = 6, (7, 3, 5, 2)


def world():
    return clusters(COUNTS, DIM, seed=3)


# What a refit changes beside the image: the mean of the counts of `ridge`, shrinkage and degrees of freedom of `lda`.
@pytest.mark.parametrize(
    "spec, near",
    [
        ("text", 1e-6),
        ("prototype", 1e-5),
        ("ridge:ridge=0.3", 0.06),
        ("ranpac:features=40,ridge=2", 0.06),
        ("lda:shrinkage=0.5,prior_images=0", 0.2),
        ("gda:shrinkage=0.5,prior_images=0,alpha=0.5", 0.2),
        ("bridge:depths=0.3/0.3", 1e-5),
    ],
)
def test_scores_are_those_of_a_classifier_that_has_not_learned_the_image(spec, near):
    rows, labels, texts = world()
    found = in_tasks(spec, rows, labels, texts).left_out(rows, labels)
    for i in range(len(rows)):
        kept = torch.arange(len(rows)) != i
        expected = in_tasks(spec, rows[kept], labels[kept], texts)(rows[[i]])[0].double()
        assert float((found[i] - expected).abs().max()) <= near * float(expected.abs().max()), (spec, i)
    assert found.shape == (len(rows), len(COUNTS))


def test_bofa_leaves_an_image_out_of_the_mean_and_keeps_the_text_and_their_weight():
    rows, labels, texts = world()
    whole = in_tasks("bofa", rows, labels, texts)
    weight, found = float(whole.image_weight), whole.left_out(rows, labels)
    assert 0 < weight < 1
    for i in range(len(rows)):
        kept = torch.arange(len(rows)) != i
        means = torch.stack([F.normalize(rows[kept & (labels == c)].double().sum(dim=0), dim=0) for c in range(4)])
        expected = 20 * rows[i].double() @ ((1 - weight) * texts.double() + weight * means).T
        torch.testing.assert_close(found[i].double(), expected, atol=1e-5, rtol=0)


def test_a_share_weighs_classes_alike_and_has_wilson_s_interval():
    rows, labels, texts = world()
    classifier = in_tasks("text", rows, labels, texts)
    right = classifier(rows).argmax(dim=1) == labels
    p = sum(float(right[labels == c].double().mean()) for c in range(4)) / 4
    n = 4**2 / sum(1 / count for count in COUNTS)  # as many images as the unequal classes are worth
    share, low, high = left_out_share(classifier, rows, labels)
    assert share == pytest.approx(p) and 0 < p < 1
    for end in (low, high):  # the ends are where p is 1.96 standard errors away
        assert (p - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / n)
    assert low < p < high
