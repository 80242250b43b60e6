"""The Bayesian classifier against a literal float64 reading: Gaussians over all images at once, image by image."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from scipy.linalg import fractional_matrix_power
from torch.nn import functional as F

from dulbe_peft import BayesClassifier
from dulbe_peft.classifiers.calibration import hold_back
from dulbe_peft.classifiers.evidence import best_step
from dulbe_peft.classifiers.sums import RIDGES

DIM, CLASSES, SCALE, WIDTH = 6, 5, 20.0, 8
CENTRES = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(0))
TEXTS = CENTRES + torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))
TESTS = torch.randn(30, DIM, generator=torch.Generator().manual_seed(2))


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


@pytest.mark.parametrize(
    "settings", [{"ridge": 2.0}, {}, {"text_images": 0.0}, {"text_images": 2.5}, {"flatness": 0.0}]
)
@pytest.mark.parametrize("features", [0, WIDTH])
@pytest.mark.parametrize("increment", [CLASSES, 2])
def test_the_stream_gives_the_posterior_of_all_images_at_once(settings, features, increment):
    classifier = make(increment=increment, features=features, **settings)
    images, labels = photos(range(CLASSES))
    scores, _, ridge = literal(images, labels.tolist(), TEXTS, TESTS, features=features, **settings)
    assert classifier.strength() == pytest.approx(ridge)
    close(classifier(TESTS), scores)


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


def test_with_a_large_ridge_it_is_the_text_classifier_and_new_texts_replace_the_old_ones():
    classifier = make()
    classifier.set_text_embeds(TEXTS.flip(0))
    images, labels = photos(range(CLASSES))
    close(classifier(TESTS), literal(images, labels.tolist(), TEXTS.flip(0), TESTS)[0])
    probabilities = make(ridge=1e12, text_images=0.0)(TESTS).softmax(dim=1)
    expected = (SCALE * F.normalize(TESTS, dim=1) @ F.normalize(TEXTS, dim=1).T).softmax(dim=1)
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=1e-5)


def test_one_class_and_equal_texts_have_finite_scores():
    classifier = BayesClassifier(DIM, SCALE, features=WIDTH)
    images, labels = photos([0], each=1)
    classifier.add_classes(["a"], images, labels, TEXTS[:1])
    assert classifier(TESTS).shape == (30, 1) and classifier(TESTS).isfinite().all()
    classifier.add_classes(["b"], images, labels, TEXTS[[0, 0]])
    assert classifier(TESTS).isfinite().all()


def test_wins_are_counted_on_images_that_the_copy_has_not_seen():
    """Two tasks, read image by image: which lambdas, in steps from the most likely one, are right where others err."""
    images, labels = photos(range(CLASSES), each=25)
    images = images + torch.randn(images.shape, generator=torch.Generator().manual_seed(8))
    classifier = BayesClassifier(DIM, SCALE, features=WIDTH)
    expected = torch.zeros(25, 25, dtype=torch.int64)
    for start, stop in ((0, 3), (3, 5)):
        own = (labels >= start) & (labels < stop)
        held = torch.zeros(len(labels), dtype=torch.bool)
        held[own.nonzero()[:, 0][hold_back(F.normalize(images[own], dim=1), labels[own])]] = True
        known = (labels < stop) & ~held
        assert 0 < held.sum() < own.sum()
        seen, known_labels, texts = images[known], labels[known].tolist(), TEXTS[:stop]
        _, evidence, _ = literal(seen, known_labels, texts, images[held])
        right = [
            literal(seen, known_labels, texts, images[held], ridge * WIDTH)[0].argmax(dim=1) == labels[held]
            for ridge in RIDGES
        ]
        steps = [right[min(max(int(np.argmax(evidence)) + step, 0), 12)].tolist() for step in range(-12, 13)]
        for i, j, image in np.ndindex(25, 25, int(held.sum())):
            expected[i, j] += steps[i][image] and not steps[j][image]
        names = [str(label) for label in range(start, stop)]
        classifier.add_classes(names, images[own], labels[own] - start, texts)
    assert torch.equal(classifier.wins, expected) and len(expected.unique()) > 2
    more, own = photos(range(CLASSES), each=25, seed=7)
    classifier.update_classes(more, own)  # as many again, so what the first ones said counts for half
    assert torch.equal(classifier.wins, expected // 2)


def wins_of(counts):
    """What `wins` is where step i was right on images 0 to counts[i] - 1 of all; other steps as the step 0."""
    right = torch.zeros(25, 1000)
    for step in range(-12, 13):
        right[step + 12, : counts.get(step, counts[0])] = 1
    return (right @ (1 - right).T).long()


@pytest.mark.parametrize(
    "counts, step",
    [
        ({0: 50}, 0),
        ({0: 50, 2: 59}, 0),  # nine images that only one of the two tells right: three standard deviations
        ({0: 50, 2: 60}, 2),
        ({0: 50, 1: 65, 4: 90}, 4),  # 1 is clearly better than 0, and 4 than 1
        ({0: 50, 1: 88, 4: 90}, 4),  # two images of two: more than one standard deviation
        ({0: 50, 1: 89, 4: 90}, 1),
        ({0: 50, -1: 90, 1: 89, 5: 90}, -1),
        ({0: 50, 2: 20, 3: 0}, 0),
    ],
)
def test_the_step_is_the_shortest_that_is_clearly_better(counts, step):
    assert best_step(wins_of(counts)) == step


@pytest.mark.parametrize("step, place", [(2, 2), (-1, -1), (12, None)])
def test_held_back_images_move_lambda_by_steps_of_the_grid(step, place):
    classifier = make()
    likeliest = RIDGES.index(classifier.strength() / WIDTH)
    wanted = RIDGES[likeliest + place] if place else RIDGES[-1]
    assert 0 < likeliest < len(RIDGES) - 3
    classifier.load_state_dict(classifier.state_dict() | {"wins": wins_of({0: 1, step: 19})})
    assert classifier.strength() == pytest.approx(wanted * WIDTH)
    images, labels = photos(range(CLASSES))
    close(classifier(TESTS), literal(images, labels.tolist(), TEXTS, TESTS, wanted * WIDTH)[0])
