"""Temperatures, rejection and prediction sets: literal references, and the guaranteed rates in simulations."""

import math

import numpy as np
import pytest
import reference
import torch
from taught import clusters, in_tasks
from torch.nn import functional as F

from dulbe_peft.classifiers import calibration
from dulbe_peft.classifiers.calibration import (
    LIMIT,
    MOST_KEPT,
    TaskTemperature,
    fit_temperature,
    temperature,
)
from dulbe_peft.classifiers.leaving import hold_back

DIM = 12


def test_a_fifth_of_each_class_is_held_out_in_any_order():
    images = F.normalize(torch.randn(40, 8), dim=1)
    labels = torch.tensor([0] + [1] * 2 + [2] * 4 + [3] * 8 + [4] * 25)
    held = hold_back(images, labels)
    assert [int(held[labels == c].sum()) for c in range(5)] == [0, 1, 1, 2, 5]
    mixed = torch.randperm(40)
    assert torch.equal(hold_back(images[mixed], labels[mixed]), held[mixed])


def test_temperature_minimises_the_log_loss():
    logits = 8 * torch.randn(300, 6)
    labels = (logits / 3 + torch.distributions.Gumbel(0.0, 1.0).sample((300, 6))).argmax(dim=1)
    actual, told = fit_temperature(logits, labels)
    assert int((told - calibration.penalties(calibration.WRONG, 300)).argmax()) == 0
    grid = torch.linspace(-2, 4, 601).tolist()
    losses = {t: F.cross_entropy(logits.double() / math.exp(t), labels).item() for t in grid}
    assert actual == pytest.approx(min(losses, key=losses.get), abs=0.03)
    sure = 5 * torch.eye(4)
    assert -LIMIT < fit_temperature(sure, torch.arange(4))[0] < 1
    assert fit_temperature(sure, (torch.arange(4) + 1) % 4)[0] == pytest.approx(LIMIT)


@pytest.mark.parametrize("classes", [2, 6])
def test_temperature_and_share_of_wrong_labels_are_those_of_a_literal_search(classes):
    """Of 200 labels drawn from the probabilities at T = 3, a fifth is replaced by a random other class."""
    generator = torch.Generator().manual_seed(0)
    logits = 12 * torch.randn(200, classes, generator=generator).double()
    labels = torch.multinomial((logits / 3).softmax(dim=1), 1, generator=generator)[:, 0]
    wrong = torch.rand(200, generator=generator) < 0.2
    others = (labels + torch.randint(1, classes, (200,), generator=generator)) % classes
    labels = torch.where(wrong, others, labels)
    found, told = fit_temperature(logits, labels)
    grid = np.linspace(0, 3, 76)
    table = np.array([reference.label_noise(logits, labels, math.exp(t), calibration.WRONG) for t in grid])
    best = table - [-math.log1p(-w) + (w > 0) * math.log(200) / 2 for w in calibration.WRONG]
    place, number = np.unravel_index(best.argmax(), best.shape)
    assert found == pytest.approx(grid[place], abs=0.03)
    assert int((told - calibration.penalties(calibration.WRONG, 200)).argmax()) == number
    # The temperatures that are compared are a factor of sqrt(2) apart; a parabola lies between them.
    assert told[:16].tolist() == pytest.approx(table.max(axis=0)[:16].tolist(), abs=0.3)
    share, low, high = calibration.share_of_wrong_labels([fitted(wrong=told - told.max())])
    assert low < float(wrong.double().mean()) < high and abs(share - 0.2) < 0.08
    plain = min(grid, key=lambda t: F.cross_entropy(logits / math.exp(t), labels).item())
    assert plain > found + 0.3, "without w, wrong labels make all answers unsure"


def test_interval_of_the_share_of_wrong_labels_adds_up_over_tasks():
    """n right and k wrong labels that are certain: the likelihood of w is that of a binomial."""
    likelihoods = [0.0 if w == 0 else 5 * math.log(w) + 95 * math.log1p(-w) for w in calibration.WRONG]
    likelihoods[0] = -200.0
    one = calibration.share_of_wrong_labels([fitted(wrong=likelihoods)])
    assert one == pytest.approx((0.05, 0.0182, 0.1052), abs=2e-3)  # -2 log(L / L_max) = 3.84 for 5 of 100
    share, low, high = calibration.share_of_wrong_labels([fitted(wrong=likelihoods)] * 4)
    assert share == pytest.approx(one[0], abs=1e-3) and high - low < 0.6 * (one[2] - one[1])
    assert calibration.share_of_wrong_labels([fitted()]) is None


def test_wrong_labels_do_not_enlarge_prediction_sets():
    """A tenth of the labels is wrong, with probabilities near 0: the threshold is that of the right labels."""
    right = (torch.arange(900, dtype=torch.float64) + 0.5) / 1000 + 0.1
    kept = calibration.evenly(
        torch.cat([torch.full((100,), 1e-5).double(), right]), torch.ones(1000).double()
    ).tolist()
    likelihoods = [-1000.0 if w == 0 else 100 * math.log(w) + 900 * math.log1p(-w) for w in calibration.WRONG]
    plain, known = (fitted(images=1000, own=kept, wrong=wrong) for wrong in ((), likelihoods))
    assert calibration.threshold([plain], "own", 0.1) < 0.01
    assert calibration.threshold([known], "own", 0.1) == pytest.approx(0.175, abs=0.01)
    assert calibration.threshold([known], "largest", 0.1) == calibration.threshold([plain], "largest", 0.1)


def fitted(log_temperature=0.0, images=30, classes=10, own=(), wrong=()):
    facts = {"log_temperature": log_temperature, "images": images, "worth": images, "classes": classes}
    facts["wrong"] = tuple(map(float, wrong))
    return TaskTemperature(**facts, own=tuple(own), largest=tuple(own))


def test_temperature_is_a_line_over_the_number_of_classes_with_larger_weights_for_new_tasks():
    tasks = [fitted(0.5 * math.log(classes), images, classes) for classes, images in ((10, 5), (20, 50), (40, 9))]
    assert temperature(tasks, 80) == pytest.approx(math.sqrt(80))
    same = [fitted(0.0, 30), fitted(1.0, 10)]
    assert temperature(same, 50) == pytest.approx(math.exp(10 / (10 + 30 * 0.85)))
    counts, values = (10, 30, 50), [0.3, 0.2, 0.9]
    weights, design = np.diag([30 * 0.85**2, 20 * 0.85, 10]), np.array([(1, math.log(c)) for c in counts])
    line = np.linalg.solve(design.T @ weights @ design, design.T @ weights @ values)
    tasks = [fitted(*task) for task in zip(values, (30, 20, 10), counts, strict=True)]
    assert temperature(tasks, 90) == pytest.approx(math.exp(line @ (1, math.log(90))))
    assert temperature([], 10) == 1.0


def test_calibration_stores_probabilities_of_held_out_images():
    images, labels, _ = clusters(5 * [8], DIM)
    held = hold_back(images, labels)
    classifier, twin = (in_tasks("prototype", images[rows], labels[rows]) for rows in (labels >= 0, ~held))
    (task,) = classifier.calibration
    assert task.log_temperature == pytest.approx(fit_temperature(twin(images[held]), labels[held])[0], abs=1e-4)
    actual = (twin(images[held]).double() / classifier.temperature).softmax(dim=1)
    own = actual.gather(1, labels[held][:, None])[:, 0]
    for kept, each in ((task.own, own), (task.largest, actual.amax(dim=1))):
        torch.testing.assert_close(torch.tensor(kept).double(), each.sort().values, rtol=0, atol=1e-4)
    labels = torch.arange(3).repeat_interleave(torch.tensor([333, 333, 334]))
    many = calibration.calibrated((), torch.randn(1000, 3), labels, labels, lambda tasks: 1.0)[0]
    assert many.images == 1000 and many.worth == 999 and len(many.own) == len(many.largest) == MOST_KEPT


def test_calibration_weights_all_classes_equally():
    """One of four classes has seven held-out images, two have two, and one has a single image, never held out."""
    learned = torch.tensor([0] * 7 + [1] * 2 + [2] * 2 + [3])
    labels = learned[:-1]
    weights = calibration.class_shares(labels, learned)
    torch.testing.assert_close(weights, torch.tensor([1 / 7] * 7 + [1.5 / 2] * 4).double())
    logits = 4 * torch.randn(11, 4, dtype=torch.float64)
    (task,) = calibration.calibrated((), logits, labels, learned, lambda tasks: temperature(tasks, 4))
    assert task.images == 11 and task.worth == int(16 / (7 / 49 + 4 * 0.75**2)) == 6
    actual = (logits / temperature([task], 4)).softmax(dim=1)
    for kept, values in ((task.own, actual.gather(1, labels[:, None])[:, 0]), (task.largest, actual.amax(dim=1))):
        order, expected = values.argsort().tolist(), []
        for place in range(6):  # the first value up to which the weights are (place + 1/2) / 6 of all
            reached = np.cumsum([float(weights[row]) for row in order]) / 4
            expected.append(float(values[order[int((reached < (place + 0.5) / 6).sum())]]))
        assert kept == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("share, place", [(0.05, 2), (0.1, 4), (0.33, 13), (0.03, 1)])
def test_threshold_is_an_order_statistic_of_the_newest_sufficient_tasks(share, place):
    values = np.sort(np.random.default_rng(0).random(41))
    old, new = fitted(images=20, own=values[:20]), fitted(images=41, own=values)
    assert calibration.threshold([old, new], "own", share) == values[place - 1]
    assert calibration.threshold([new, old], "own", 1 / 21) == values[0]
    both = sorted([*values, *values[:20]])
    assert calibration.threshold([new, old], "own", 1 / 22) == both[1], "21 images are more than 20"


def test_threshold_keeps_small_shares_although_only_quantiles_are_stored():
    """The share of equally likely values below the threshold is the threshold itself."""
    values = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    kept = calibration.evenly(values, torch.ones(1000, dtype=torch.float64)).tolist()
    task = fitted(images=1000, own=kept)
    for share in (0.0025, 0.007, 0.01, 0.05, 0.3):
        assert 0.3 * share < calibration.threshold([task], "own", share) <= share + 1e-9
    with pytest.raises(ValueError, match="takes 999 images .* there are 399: .* a few hundred images at most"):
        calibration.threshold([task], "own", 0.001)
    assert calibration.threshold([task] * 3, "own", 0.001) <= 0.0025


def test_too_few_images_raise_an_error_that_says_how_many_are_needed():
    images, labels, _ = clusters(5 * [2], DIM)
    classifier = in_tasks("prototype", images, labels)
    for call, needed in (
        (lambda: classifier.rejection_threshold(0.05), 19),
        (lambda: classifier.prediction_sets(images, 0.9), 9),
        (lambda: classifier.prediction_sets(images, 0.99), 99),
    ):
        with pytest.raises(ValueError, match=f"takes {needed} images .*, and there are 5"):
            call()
    assert 0 < classifier.rejection_threshold(0.2) < 1
    for call in (lambda: classifier.rejection_threshold(1.0), lambda: classifier.prediction_sets(images, 95)):
        with pytest.raises(ValueError, match="must be a number between 0 and 1, such as 0"):
            call()


@pytest.mark.plain("lda")
@pytest.mark.parametrize(
    ("spec", "each"),
    [
        ("bayes:features=0", (3, 30)),
        ("lda", (10,)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("bayes:features=0", (10,)), ("lda", (3, 30))]),
        *(pytest.param("bridge", each, marks=pytest.mark.slow) for each in [(10,), (3, 30)]),
    ],
)
def test_coverage_rejection_and_roc_area_hold_over_all_seen_classes(spec, each):
    """Means over eight streams of 20 classes, five per task. Their standard error is about one percentage point."""
    covered, refused, sizes, lost, area, estimated = [], [], [], [], [], []
    for seed in range(8):
        rows, labels, texts = clusters(40 * [80], DIM, seed, spread=1.1)
        place, known = torch.arange(len(labels)) % 80, labels < 20
        taught, tested = known & (place < torch.tensor(each)[labels % len(each)]), known & (place >= 30)
        classifier = in_tasks(spec, rows[taught], labels[taught], texts, increment=5)
        tests, truth = rows[tested], labels[tested]
        sets = classifier.prediction_sets(tests, 0.9)
        covered.append(sets[torch.arange(len(truth)), truth].double().mean().item())
        sizes.append(sets.sum(dim=1).double().mean().item())
        sure = classifier.probabilities(tests).amax(dim=1)
        refused.append((sure < classifier.rejection_threshold(0.1)).double().mean().item())
        assert sets.any(dim=1).all()
        lost.append(classifier.refused(tests, 0.1).double().mean().item())
        novel, novelty = classifier.novelty(rows[~known]), classifier.novelty(tests)
        area.append((novel[:, None] > novelty).double().mean().item())
        estimated.append(classifier.roc_area)
    assert np.mean(covered) == pytest.approx(0.91, abs=0.04) and 1 < np.mean(sizes) < 12
    assert np.mean(refused) == pytest.approx(0.09, abs=0.04)
    assert np.mean(lost) == pytest.approx(0.09, abs=0.04)
    if spec != "bridge":
        assert np.mean(estimated) == pytest.approx(np.mean(area), abs=0.06) and 0.6 < np.mean(area) < 0.99
