"""Compare every classifier with a literal solution on all images at once, and test what all classifiers share."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from taught import (
    CLASSES,
    DIM,
    KINDS,
    NAMED,
    SCALE,
    assert_equal_states,
    clusters,
    digits,
    in_tasks,
    learned,
    snapshot,
    task,
)
from torch.nn import functional as F

from dulbe_peft.classifiers import make_classifier
from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.classifiers.gda import ALPHAS, TEMPERATURES, WRONG
from dulbe_peft.classifiers.leaving import hold_back
from dulbe_peft.classifiers.ridge import RIDGES
from dulbe_peft.training.estimating import left_out_share

JOINT = ["prototype", "lda", "lda fixed", "gda fixed", "ridge fixed", "ranpac fixed", "bayes fixed"]
# gda and bayes with automatic settings are missing, because their leave-one-out losses depend on the classes that were
# known at that time.
UPDATING = [*JOINT, "ridge", "ranpac", "bofa"]


def lift(images):
    return (images @ torch.from_numpy(np.random.RandomState(0).standard_normal((DIM, 200)))).clamp(min=0)


@pytest.fixture(scope="module")
def unequal():
    """Return two images of every odd digit and 14 of every even one, their labels, and the numbers per class."""
    rows = torch.cat([(digits.labels == c).nonzero()[: 2 if c % 2 else 14, 0] for c in range(CLASSES)])
    labels = digits.labels[rows]
    return digits.images[rows], labels, torch.bincount(labels).double()


@pytest.mark.parametrize("name", ["text", "prototype", "lda", "lda fixed", "ridge fixed", "ranpac fixed"])
def test_classifiers_equal_their_references_with_unequal_counts(name, unequal):
    images, labels, counts = unequal
    known, weights = (images, labels.tolist(), digits.tests), SCALE * (counts.mean() / counts) ** 0.75
    expected = {
        "text": lambda: SCALE * reference.unit(digits.tests) @ reference.unit(digits.texts).T,
        "prototype": lambda: reference.class_mean_logits(*known, SCALE),
        "lda": lambda: reference.lda_logits(*known, None, prior_images=1.0),
        "lda fixed": lambda: reference.lda_logits(*known, 0.1, prior_images=1.0),
        "ridge fixed": lambda: weights * reference.ridge_scores(*known, 0.5),
        "ranpac fixed": lambda: weights * reference.ridge_scores(*known, 20.0, lift=lift),
    }[name]()
    actual = in_tasks(name, images, labels, digits.texts, increment=2)(digits.tests).double()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


def test_gda_chooses_alpha_by_leave_one_out_log_loss(unequal):
    images, labels, counts = unequal
    classifier = make_classifier("gda:shrinkage=0.2", DIM, SCALE)
    classifier.add_classes([str(c) for c in range(CLASSES)], images, labels, digits.texts)
    text = SCALE * reference.unit(images) @ reference.unit(digits.texts).T
    freedom = int(classifier.freedom)
    whole = (int(counts.max()), classifier.means.mean(dim=0), freedom, classifier.scatter.trace() / freedom / DIM)
    temperatures, wrong = torch.tensor(TEMPERATURES).double(), torch.tensor(WRONG).double().clamp(max=1 - 1 / CLASSES)
    losses = torch.zeros(len(ALPHAS), len(TEMPERATURES), len(WRONG), dtype=torch.float64)
    for i, label in enumerate(labels.tolist()):
        rest = torch.arange(len(labels)) != i
        scores = reference.lda_logits(images[rest], labels[rest].tolist(), images[i : i + 1], 0.2, 1.0, whole)[0]
        for a, alpha in enumerate(ALPHAS):
            mixed = (text[i] + alpha * scores) / (temperatures[:, None] * max(1, alpha))
            own = mixed.softmax(dim=1)[:, label, None]
            losses[a] -= ((1 - wrong) * own + wrong * (1 - own) / (CLASSES - 1)).log()
    torch.testing.assert_close(classifier.losses, losses, rtol=1e-4, atol=1e-3)
    penalty = torch.tensor([(math.log(len(labels)) / 2 if w else 0) - math.log(1 - w) for w in WRONG])
    alpha = ALPHAS[int((losses + penalty).amin(dim=(1, 2)).argmin())]
    assert classifier.weight() == alpha and ALPHAS[0] < alpha < ALPHAS[-1]
    by_image = reference.lda_logits(images, labels.tolist(), digits.tests, 0.2, 1.0)
    expected = SCALE * reference.unit(digits.tests) @ reference.unit(digits.texts).T + alpha * by_image
    torch.testing.assert_close(max(1, alpha) * classifier(digits.tests).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "unit"), [("ridge", 1.0), ("ranpac", 200.0)])
def test_lambda_is_the_best_on_the_held_out_images_of_all_tasks(name, unit):
    lifted = lift if name == "ranpac" else lambda images: images
    total = torch.zeros(len(RIDGES), dtype=torch.float64)
    seen_images, seen_labels = torch.zeros(0, DIM), []
    for start in range(0, CLASSES, 2):
        images, labels = task([start, start + 1])
        held = hold_back(F.normalize(images, dim=1), labels)
        truth = F.one_hot(labels[held] + start, start + 2)
        for number, ridge in enumerate(RIDGES):
            fit = torch.cat([seen_images, images[~held]]), seen_labels + (labels[~held] + start).tolist()
            scores = reference.ridge_scores(*fit, images[held], ridge * unit, lifted)
            total[number] += ((scores - truth) ** 2).sum()
        seen_images, seen_labels = torch.cat([seen_images, images]), seen_labels + (labels + start).tolist()
    classifier = learned(name)
    torch.testing.assert_close(classifier.errors, total, rtol=1e-3, atol=1e-3)
    assert classifier.strength() == unit * RIDGES[int(total.argmin())]
    assert 0 < int(total.argmin()) < len(RIDGES) - 1


def test_indefinite_gram_matrix_is_solved_with_a_larger_lambda():
    classifier = make_classifier("ranpac:features=200,ridge=1e-9", DIM)
    images, labels = task([0, 1], per_class=5)
    classifier.add_classes(["a", "b"], images, labels)
    assert torch.linalg.cholesky_ex(classifier.gram.double() + 1e-9 * torch.eye(200))[1] > 0
    assert classifier(images).argmax(dim=1).tolist() == labels.tolist()


@pytest.mark.plain("10", "1-4-lda")
@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize(("increment", "shuffle"), [(10, 0), (1, 4)])
def test_order_of_classes_tasks_and_images_does_not_change_the_solution(name, increment, shuffle):
    expected = learned(name)(digits.tests)
    order = [3, 9, 0, 4, 7, 1, 8, 6, 2, 5]
    actual = learned(name, order, increment, shuffle=shuffle)
    back = [order.index(c) for c in range(CLASSES)]
    torch.testing.assert_close(actual(digits.tests)[:, back], expected, rtol=1e-4, atol=2e-3)


@pytest.mark.plain("prototype", "lda", "ridge", "bofa")
@pytest.mark.parametrize("name", UPDATING)
def test_update_classes_equals_learning_all_images_at_once(name):
    images, labels = task(range(CLASSES), per_class=30)
    early = torch.arange(len(labels)) % 30 < 10
    late, together = (in_tasks(name, images[rows], labels[rows], digits.texts) for rows in (early, early >= 0))
    before, state = late.fork(), snapshot(late)
    for rows in (~early).nonzero()[:, 0].split(77):
        late.update_classes(images[rows], labels[rows])
    late.update_classes(images[:0], labels[:0])
    assert_equal_states(snapshot(before), state)
    if hasattr(late, "errors"):
        late.ridge = together.ridge = together.strength()
    if name == "bofa":  # its weight was chosen on the first images
        late.install({"image_weight": together.image_weight})
    torch.testing.assert_close(late(digits.tests), together(digits.tests), rtol=1e-4, atol=2e-3)
    assert late.counts.tolist() == [30] * CLASSES


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_forgetting_a_class_keeps_other_scores_and_forgetting_all_resets_the_classifier(name):
    classifier = learned(name)
    expected, count = classifier(digits.tests), classifier.temperature
    classifier.forget_class("class 4")
    kept = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert classifier.class_names == [f"class {c}" for c in kept]
    # The scores of these classifiers depend on which other classes there are.
    if name not in ("visual_agent", "engine", "proof", "clap4clip", "clg_cbm", "bayes", "pooled_bridge"):
        torch.testing.assert_close(classifier(digits.tests), expected[:, kept], rtol=1e-5, atol=1e-4)
    assert classifier.temperature == pytest.approx(count, rel=0.2)
    with pytest.raises(ValueError, match="'class 4' is not known"):
        classifier.forget_class("class 4")
    classifier.add_classes(["class 4"], *task([4], 9), digits.texts[[*kept, 4]])
    assert classifier(digits.tests).shape == (len(digits.tests), CLASSES)
    new = learned(name, range(2), per_class=9)
    for known in classifier.class_names:
        classifier.forget_class(known)
    assert_equal_states(snapshot(classifier), snapshot(learned(name, ())))
    classifier.add_classes(new.class_names, *task(range(2), 9), digits.texts[:2])
    assert_equal_states(snapshot(classifier), snapshot(new))


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_one_image_per_class_is_enough(name):
    spec = "linear_head:epochs=50,learning_rate=0.01" if name == "linear_head" else name  # one step an epoch
    classifier = learned(spec, per_class=1)
    assert classifier.temperature == 1.0 or name == "bayes"
    assert classifier.nbytes == learned(spec, range(2), per_class=1).state.nbytes(CLASSES)
    accuracy = (classifier(digits.tests).argmax(dim=1) == digits.truth).double().mean()
    assert accuracy > 0.4
    torch.testing.assert_close(classifier.probabilities(digits.tests).sum(dim=1), torch.ones(len(digits.tests)))


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_probabilities_of_digits_are_calibrated(name):
    classifier = learned(name, scale=SCALE if name in ("proof", "clap4clip", "clg_cbm") else 100.0)  # these are slow
    raw = reference.calibration_error(classifier(digits.tests).softmax(dim=1), digits.truth)
    calibrated = reference.calibration_error(classifier.probabilities(digits.tests), digits.truth)
    assert calibrated < (raw if name in ("lda", "ridge") else raw + 0.01)
    # A temperature cannot calibrate nearly flat mixtures well, nor rows of separate tasks.
    assert calibrated < {"visual_agent": 0.12, "gda": 0.07, "linear_head": 0.15}.get(name, 0.06)
    assert torch.equal(classifier.probabilities(digits.tests).argmax(dim=1), classifier(digits.tests).argmax(dim=1))


def test_linear_map_solves_its_normal_equations():
    before, after = torch.randn(50, 8), torch.randn(50, 8)
    actual = linear_map(before, after, ridge=0.5)
    weight = 0.5 * before.double().square().sum() / 8
    slope = before.double().T @ (before.double() @ actual - after.double()) + weight * (actual - torch.eye(8))
    torch.testing.assert_close(slope, torch.zeros(8, 8, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["bridge", "pooled_bridge", "prototype", "lda fixed", "gda fixed", "ridge fixed", "bayes fixed"]
)
def test_move_follows_a_rotation_of_all_features_exactly(name):
    turn = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64))[0]
    classifier = learned(name)
    expected = classifier(digits.tests)
    classifier.move(turn)
    if classifier.reads_text:
        classifier.set_text_embeds((F.normalize(digits.texts, dim=1).double() @ turn).float())
    actual = classifier((digits.tests.double() @ turn).float())
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-3)


@pytest.mark.plain("visual_agent", "rapf")
@pytest.mark.parametrize("name", ["visual_agent", "rapf", "slca", "engine", "proof", "clap4clip", "clg_cbm"])
def test_move_of_trained_classifiers_changes_only_their_image_statistics(name):
    classifier, matrix = learned(name), torch.eye(DIM).double() + 0.01 * torch.randn(DIM, DIM, dtype=torch.float64)
    expected, before = {key: value.double() for key, value in snapshot(classifier).items()}, classifier(digits.tests)
    for key in ("means", "agents", "scatter"):
        if key in expected:
            expected[key] = expected[key] @ matrix
    for key in ("factors", "scatter"):
        if key in expected:
            expected[key] = matrix.T @ expected[key]
    classifier.move(matrix)
    actual = {key: value.double() for key, value in snapshot(classifier).items()}
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(classifier(digits.tests), before) == (name in ("rapf", "slca", "clg_cbm"))


FEW = (7, 3, 5, 2)  # images of each class


# Tolerances. A refit also changes the mean of the counts of `ridge`, and shrinkage and degrees of freedom of `lda`.
LEFT_OUT = {
    "text": 1e-6,
    "prototype": 1e-5,
    "bofa": 1e-5,
    "bridge:depths=0.3/0.3": 1e-5,
    "ridge:ridge=0.3": 0.06,
    "ranpac:features=40,ridge=2": 0.06,
    "lda:shrinkage=0.5,prior_images=0": 0.2,
    "gda:shrinkage=0.5,prior_images=0,alpha=0.5": 0.2,
}


@pytest.mark.plain("text", "bridge:depths=0.3/0.3", "ridge:ridge=0.3", "lda:shrinkage=0.5,prior_images=0")
@pytest.mark.parametrize(("spec", "near"), LEFT_OUT.items())
def test_left_out_scores_equal_those_of_a_classifier_without_the_image(spec, near):
    rows, labels, texts = clusters(FEW, 6, seed=3)
    whole = in_tasks(spec, rows, labels, texts)
    actual = whole.left_out(rows, labels)
    assert actual.shape == (len(rows), len(FEW))
    for i in range(len(rows)):
        kept = torch.arange(len(rows)) != i
        other = in_tasks(spec, rows[kept], labels[kept], texts)
        if spec == "bofa":  # its weight was chosen on all images
            assert 0 < whole.image_weight < 1
            other.install({"image_weight": whole.image_weight})
        expected = other(rows[[i]])[0].double()
        assert float((actual[i] - expected).abs().max()) <= near * float(expected.abs().max()), (spec, i)


def test_left_out_accuracy_weights_classes_equally_and_has_the_wilson_interval():
    rows, labels, texts = clusters(FEW, 6, seed=3)
    classifier = in_tasks("text", rows, labels, texts)
    correct = classifier(rows).argmax(dim=1) == labels
    p = sum(float(correct[labels == c].double().mean()) for c in range(4)) / 4
    n = 4**2 / sum(1 / count for count in FEW)  # effective number of images of unequal classes
    accuracy, low, high = left_out_share(classifier, rows, labels)
    assert accuracy == pytest.approx(p) and 0 < p < 1
    for end in (low, high):  # p is 1.96 standard errors away from each end
        assert (p - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / n)
    assert low < p < high
