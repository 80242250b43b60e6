"""The Bayesian classifier against a literal float64 reading: Gaussians over all images at once, image by image."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import reference
import torch
from scipy.linalg import fractional_matrix_power
from torch.nn import functional as F

from dulbe_peft import BayesClassifier
from dulbe_peft.classifiers.ridge import RIDGES

DIM, CLASSES, SCALE, WIDTH = 6, 5, 20.0, 8
CENTRES = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
TEXTS = CENTRES + torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))
TESTS = torch.randn(30, DIM, generator=torch.Generator().manual_seed(2))
FIXED, AUTO = {"ridge": 2.0}, {}


def photos(classes, each=4, seed=3):
    labels = torch.arange(len(classes)).repeat_interleave(each)
    noise = torch.randn(len(labels), DIM, generator=torch.Generator().manual_seed(seed))
    return CENTRES[list(classes)][labels] + 0.7 * noise, labels


def make(classes=range(CLASSES), increment=CLASSES, each=4, **settings):
    classifier, classes = BayesClassifier(DIM, SCALE, **{"features": WIDTH, **settings}), list(classes)
    images, labels = photos(range(CLASSES), each)
    for start in range(0, len(classes), increment):
        new = classes[start : start + increment]
        rows = torch.cat([(labels == c).nonzero()[:, 0] for c in new])
        own = torch.arange(len(new)).repeat_interleave(each)
        classifier.add_classes([str(c) for c in new], images[rows], own, TEXTS[classes[: start + len(new)]])
    return classifier


def literal(
    images, labels, texts, tests, ridge=None, features=WIDTH, text_weight=0.03, text_images=1.0, flatness=0.25
):
    """Scores of the tests and the log evidence of each ridge: Gaussian processes over images, one a class.

    A label below 0 is of an image that belongs to none of the classes. A text that counts for k images is one row,
    whose target and whose h are times the root of k.
    """
    layer = np.random.RandomState(0).standard_normal((DIM, features)) if features else None

    def lift(rows):
        return rows if layer is None else torch.cat([rows, (rows @ torch.from_numpy(layer)).clamp(min=0)], dim=1)

    def prior(rows):
        return text_weight * SCALE * rows @ centred.T

    images, texts, tests = reference.unit(images), reference.unit(texts), reference.unit(tests)
    centred = texts - texts.mean(dim=0)
    mean = torch.stack([row for row, own in zip(images, labels, strict=True) if own >= 0]).mean(dim=0)
    shown = reference.unit(mean + math.sqrt(1 - mean @ mean) * reference.unit(centred))
    weights = torch.tensor([1.0] * len(images) + [text_images] * len(texts), dtype=torch.float64).sqrt()[:, None]
    rows = torch.cat([images, shown])
    targets = torch.zeros(len(rows), len(texts), dtype=torch.float64)
    for number, own in enumerate([*labels, *range(len(texts))]):
        if own >= 0:
            targets[number, own] = 1
    lifted, residuals = weights * lift(rows), weights * (targets - prior(rows))
    if not text_images:
        lifted, residuals = lifted[: len(images)], residuals[: len(images)]
    identity, gram = torch.eye(len(lifted), dtype=torch.float64), lifted.T @ lifted
    room = (gram / (gram.trace() / len(gram)) + 1e-3 * torch.eye(len(gram))).numpy()
    room = torch.from_numpy(fractional_matrix_power(room, -flatness))
    evidence = []
    for candidate in RIDGES:
        covariance = identity + lifted @ room @ lifted.T / (candidate * (features or 1))
        whitened = torch.linalg.inv(covariance) @ residuals
        variance = (residuals * whitened).sum() / residuals.numel()
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(lifted)).double(), variance * covariance)
        evidence.append(normal.log_prob(residuals.T).sum().item())
    ridge = ridge or RIDGES[int(np.argmax(evidence))] * (features or 1)
    kernel = lift(tests) @ room @ lifted.T @ torch.linalg.inv(lifted @ room @ lifted.T + ridge * identity)
    return (prior(tests) + kernel @ residuals) / text_weight, evidence, ridge


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("settings", [FIXED, AUTO, {"text_images": 0.0}, {"text_images": 2.5}, {"flatness": 0.0}])
@pytest.mark.parametrize("features", [0, WIDTH])
@pytest.mark.parametrize("increment", [CLASSES, 2])
def test_the_stream_gives_the_posterior_of_all_images_at_once(settings, features, increment):
    classifier = make(increment=increment, features=features, **settings)
    images, labels = photos(range(CLASSES))
    scores, _, ridge = literal(images, labels.tolist(), TEXTS, TESTS, features=features, **settings)
    assert classifier.strength() == pytest.approx(ridge)
    close(classifier(TESTS), scores)


def test_the_evidence_is_the_gaussians_log_density(monkeypatch):
    found = []
    original = BayesClassifier._solve.__globals__["log_evidence"]
    monkeypatch.setitem(
        BayesClassifier._solve.__globals__,
        "log_evidence",
        lambda *args: found.append(original(*args)) or found[-1],
    )
    classifier = make()
    found.clear()
    classifier._derived.clear()
    classifier(TESTS)
    images, labels = photos(range(CLASSES))
    _, expected, _ = literal(images, labels.tolist(), TEXTS, TESTS)
    assert len(set(np.argsort(expected).tolist())) == len(RIDGES) and 0 < int(np.argmax(expected)) < len(RIDGES) - 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_images_of_a_forgotten_class_count_as_images_of_none():
    classifier = make(increment=2)
    classifier.forget_class("1")
    images, labels = photos(range(CLASSES))
    kept = [0, 2, 3, 4]
    own = [kept.index(label) if label in kept else -1 for label in labels.tolist()]
    scores, _, ridge = literal(images, own, TEXTS[kept], TESTS)
    assert classifier.strength() == pytest.approx(ridge) and classifier.images == 4 * CLASSES
    close(classifier(TESTS), scores)


def test_further_images_are_as_if_they_had_been_there():
    classifier = make()
    more, own = photos([1, 3], each=6, seed=9)
    own = torch.tensor([1, 3])[own]
    classifier.update_classes(more, own)
    images, labels = photos(range(CLASSES))
    scores, _, ridge = literal(torch.cat([images, more]), torch.cat([labels, own]).tolist(), TEXTS, TESTS)
    assert classifier.strength() == pytest.approx(ridge)
    close(classifier(TESTS), scores)


def test_new_texts_replace_the_old_ones_in_the_prior():
    classifier = make()
    classifier.set_text_embeds(TEXTS.flip(0))
    images, labels = photos(range(CLASSES))
    close(classifier(TESTS), literal(images, labels.tolist(), TEXTS.flip(0), TESTS)[0])


def test_with_a_large_ridge_it_is_the_text_classifier():
    probabilities = make(ridge=1e12, text_images=0.0)(TESTS).softmax(dim=1)
    expected = (SCALE * F.normalize(TESTS, dim=1) @ F.normalize(TEXTS, dim=1).T).softmax(dim=1)
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=1e-5)


def test_without_weight_of_the_text_it_is_ridge_regression():
    images, labels = photos(range(CLASSES))
    expected = reference.ridge_scores(images, labels.tolist(), TESTS, 0.5)
    found = make(features=0, ridge=0.5, text_images=0.0, text_weight=1e-7, flatness=0.0)(TESTS) * 1e-7
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def test_the_more_images_the_less_the_texts_matter():
    """Texts in the wrong order, and ever more images: the share of test images that follow the images rises."""
    tests, truth = photos(range(CLASSES), each=40, seed=20)
    shares = []
    for each in (1, 8, 100):
        classifier = BayesClassifier(DIM, SCALE, features=100)
        classifier.add_classes(list("abcde"), *photos(range(CLASSES), each, seed=each), TEXTS.roll(1, dims=0))
        shares.append((classifier(tests).argmax(dim=1) == truth).double().mean().item())
    assert shares[0] < shares[1] < shares[2] and shares[2] > 0.75


def test_one_class_and_equal_texts_have_finite_scores():
    classifier = BayesClassifier(DIM, SCALE, features=WIDTH)
    images, labels = photos([0], each=1)
    classifier.add_classes(["a"], images, labels, TEXTS[:1])
    assert classifier(TESTS).shape == (30, 1) and classifier(TESTS).isfinite().all()
    classifier.add_classes(["b"], images, labels, TEXTS[[0, 0]])
    assert classifier(TESTS).isfinite().all()


def test_solving_leaves_what_is_kept_alone():
    classifier = make()
    state = copy.deepcopy(classifier.state_dict())
    classifier(TESTS)
    assert all(torch.equal(value, state[name]) for name, value in classifier.state_dict().items())
