"""Compare the novelty of images with literal float64 versions, also after changes of the classifier."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from taught import clusters, in_tasks

from dulbe_peft.classifiers import novelty
from dulbe_peft.classifiers.calibration import TaskNovelty
from dulbe_peft.classifiers.covariance import oas_shrinkage
from dulbe_peft.classifiers.evidence import LEAST, RIDGE, USUAL_IMAGES, Evidence, Sums
from dulbe_peft.classifiers.lda import LdaRule
from dulbe_peft.classifiers.leaving import choose, in_parts
from dulbe_peft.classifiers.novelty import (
    FADING,
    PARTS,
    USUAL,
    area_by_classes,
    classes_out,
    found,
    images_out,
    novelty_threshold,
    roc_interval,
    sums_of,
    weights_of,
)
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.classifiers.teaching import ClosingPass, learn_task

DIM, CLASSES, EACH = 6, 5, 9


def world(each=EACH):
    """Return unit features and labels of known classes, their texts, and features of as many unknown classes."""
    rows, labels, texts = clusters(2 * CLASSES * [each], DIM, spread=0.5)
    known = labels < CLASSES
    return rows[known], labels[known], texts[:CLASSES], rows[~known]


def symmetric(matrix, function):
    """Apply a function to the eigenvalues of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(function(values)) @ vectors.T


def scatter_of(rows, labels):
    total = torch.zeros(DIM, DIM, dtype=torch.float64)
    for c in labels.unique():
        for row in rows[labels == c]:
            total += torch.outer(row - rows[labels == c].mean(dim=0), row - rows[labels == c].mean(dim=0))
    return total


def literal(z, means, counts, scatter, freedom, texts=None):
    """Return the evidence of one image from the densities of the two Gaussians, with full matrices."""
    z, means, counts, number = z.double(), means.double(), counts.double(), len(means)
    b, eye = means.mean(dim=0), torch.eye(DIM, dtype=torch.float64)
    r = sum(torch.outer(m - b, m - b) / (1 / 4 + 1 / n) for m, n in zip(means, counts, strict=True)) / number
    s = (scatter + USUAL_IMAGES * r) / (freedom + USUAL_IMAGES)
    share = oas_shrinkage(s, freedom + number - 1)
    ridge = RIDGE * share / (1 - share)
    s = (s + ridge * s.trace() / DIM * eye) / (1 + ridge)
    root, back = symmetric(s, lambda v: v.sqrt()), symmetric(s, lambda v: v.rsqrt())
    away = (means - b) @ back
    spread = away.T @ away / (number - 1)
    share = min(1.0, oas_shrinkage(spread, number - 1))
    spread = (1 - share) * spread + share * spread.trace() / DIM * eye
    between = root @ symmetric(spread, lambda v: (v - (1 / counts).mean()).clamp_min(LEAST)) @ root
    prior, left = torch.zeros_like(means), 1.0
    if texts is not None:
        said, p = (texts - texts.mean(dim=0)) @ s, torch.linalg.inv(s)
        weights = counts / (counts + 1)
        over = sum(w * t @ p @ t for w, t in zip(weights, said, strict=True))
        a = max(0.0, float(sum(w * t @ p @ (m - b) for w, t, m in zip(weights, said, means, strict=True)) / over))
        prior = a * said
        rest = means - b - prior
        left = min(1.0, float((rest @ p * rest).sum() / ((means - b) @ p * (means - b)).sum()))
    normal = torch.distributions.MultivariateNormal
    known = []
    for m, n, p in zip(means, counts, prior, strict=True):
        inside = root @ symmetric(back @ between @ back * left, lambda v: v.clamp_min(LEAST)) @ root
        gain = inside @ torch.linalg.inv(inside + s / n)
        mean, covariance = b + p + gain @ (m - b - p), s + inside - gain @ inside
        known.append(normal(mean, (covariance + covariance.T) / 2).log_prob(z))
    return float(normal(b, s + between).log_prob(z) - torch.stack(known).logsumexp(dim=0) + math.log(number))


def sums(rows, labels, texts=None):
    rows, counts = rows.double(), labels.bincount().double()
    means = torch.stack([rows[labels == c].mean(dim=0) for c in labels.unique()])
    return Sums(means, counts, scatter_of(rows, labels), len(rows) - len(means), texts)


@pytest.mark.parametrize(("each", "named"), [(EACH, False), (EACH, True), (2, True), (1, True), (1, False)])
def test_evidence_equals_that_of_the_two_gaussians(each, named):
    rows, labels, texts, others = world(each)
    found = sums(rows, labels, 3 * texts.double() if named else None)
    expected = [literal(z, found.means, found.counts, found.scatter, found.freedom, found.texts) for z in others]
    np.testing.assert_allclose(Evidence(found)(others).numpy(), expected, rtol=1e-9, atol=1e-9)


def test_evidence_is_exact_with_fewer_classes_and_texts_than_directions():
    """All directions outside the span of means and texts are alike, so one number describes them."""
    rows, labels, texts, others = world()
    few = labels < 2
    found = sums(rows[few], labels[few], 3 * texts[:2].double())
    expected = [literal(z, found.means, found.counts, found.scatter, found.freedom, found.texts) for z in others]
    np.testing.assert_allclose(Evidence(found)(others).numpy(), expected, rtol=1e-9, atol=1e-9)


SPECS = ["lda", "gda", "bayes:features=3", "bayes:exact_forgetting=False,features=0"]


@pytest.mark.parametrize("spec", SPECS)
def test_novelty_is_the_weighted_sum_of_three_signs_also_after_an_update(spec):
    rows, labels, texts, others = world()
    first = torch.arange(len(labels)) % EACH < 4
    order = torch.tensor([2, 4, 1, 3, 0])
    places = order.argsort()  # the positions of the classes
    classifier = in_tasks(spec, rows[first], labels[first], texts, order.tolist(), increment=1)
    for known in (first, first | ~first):
        named = None if spec == "lda" else classifier.logit_scale * texts[order].double()
        found = sums(rows[known], places[labels[known]], named)
        evidence = [literal(z, found.means, found.counts, found.scatter, found.freedom, named) for z in others]
        largest = classifier.probabilities(others).amax(dim=1).double()
        odds = (largest / (1 - largest)).log().clamp(-6, 6)
        nearest = torch.zeros(len(others)).double() if named is None else (others.double() @ named.T).amax(dim=1)
        weights = weights_of(classifier.novelty_tasks)
        expected = weights[0] * torch.tensor(evidence).double() - weights[1] * odds - weights[2] * nearest
        np.testing.assert_allclose(classifier.novelty(others).numpy(), expected.numpy(), rtol=1e-4, atol=1e-4)
        classifier.update_classes(rows[~first], places[labels[~first]])


@pytest.mark.parametrize("spec", SPECS)
def test_images_of_a_forgotten_class_are_more_novel_than_before(spec):
    rows, labels, texts, _ = world()
    classifier = in_tasks(spec, rows, labels, texts, increment=1)
    before = classifier.novelty(rows[labels == 2])
    classifier.forget_class("class 2")
    assert classifier.novelty(rows[labels == 2]).mean() > before.mean()


def test_sums_without_images_and_classes_equal_those_of_the_rest():
    rows, labels, texts, _ = world()
    rows, texts = rows.double(), texts.double()
    whole = sums(rows, labels, texts)
    gone = (torch.arange(len(labels)) % 4 == 0) | (labels == 1)
    left = whole.without(rows[gone], labels[gone], torch.tensor([3]))
    kept = ~gone & (labels != 3)
    places = torch.tensor([0, -1, 1, -1, 2])[labels[kept]]
    expected = sums(rows[kept], places, texts[[0, 2, 4]])
    torch.testing.assert_close(left.means, expected.means)
    assert torch.equal(left.counts, expected.counts) and torch.equal(left.texts, texts[[0, 2, 4]])
    stays = ~gone & (labels == 3)  # other images of the class keep their contribution
    torch.testing.assert_close(left.scatter, expected.scatter + scatter_of(rows[stays], labels[stays]))
    assert left.freedom == expected.freedom + int(stays.sum()) - 1


def test_evidence_without_images_or_classes_equals_that_of_the_remaining_data():
    rows, labels, texts, _ = world()
    rows, texts = rows.double(), texts.double()
    parts = in_parts(labels, None, PARTS, labels.bincount())
    found = images_out(sums(rows, labels, texts), rows, labels, parts)
    for number, row in enumerate(rows):
        part = [place for place in range(len(rows)) if place % PARTS == number % PARTS]  # labels are in order
        kept = torch.ones(len(rows), dtype=torch.bool)
        kept[part] = False
        assert float(found[number]) == pytest.approx(
            float(Evidence(sums(rows[kept], labels[kept], texts))(row[None])), rel=1e-8, abs=1e-8
        )
    found = classes_out(sums(rows, labels, texts), rows, labels, rows, labels, torch.arange(CLASSES))
    for c in range(CLASSES):
        kept = labels != c
        left = Evidence(sums(rows[kept], labels[kept] - (labels[kept] > c).long(), texts[torch.arange(CLASSES) != c]))
        torch.testing.assert_close(found[labels == c], left(rows[labels == c]), rtol=1e-8, atol=1e-8)


def record(known, unknown, noise, classes=50):
    """Return the record of a task whose signs have these means and independent noise."""
    half = (np.array(unknown) - np.array(known)) / 2
    products = np.diag(np.square(noise)) + np.outer(half, half)
    return TaskNovelty(
        images=classes, classes=classes, known=tuple(known), unknown=tuple(unknown), products=tuple(products.flatten())
    )


def test_weights_are_least_squares_and_never_negative():
    generator = torch.Generator().manual_seed(0)
    noise = torch.tensor([3.0, 1.0, 0.5]).double()
    drawn = torch.randn(400, 3, generator=generator, dtype=torch.float64) * noise
    truth = torch.arange(400) % 2 * 2.0 - 1
    drawn[:, 0] += 2 * truth
    drawn[:, 1] += 0.8 * truth
    drawn[:, 2] += 0.1 * truth
    means = [drawn[truth == side].mean(dim=0) for side in (-1, 1)]
    away = drawn - (means[0] + means[1]) / 2
    products = away.T @ away / 400
    task = TaskNovelty(
        images=400, classes=400, known=tuple(means[0].tolist()), unknown=tuple(means[1].tolist()),
        products=tuple(products.flatten().tolist()),
    )  # fmt: skip
    scale = products.diagonal().sqrt().clamp_min(1)
    rows = torch.cat([away / scale, torch.eye(3, dtype=torch.float64)])  # the prior as three more rows
    target = torch.cat([truth.double(), torch.full((3,), USUAL, dtype=torch.float64)])
    expected = torch.linalg.lstsq(rows, target[:, None]).solution[:, 0] / scale
    assert (expected > 0).all()
    torch.testing.assert_close(weights_of([task]), expected, rtol=1e-6, atol=1e-9)
    backwards = weights_of([record((0, 0, 1), (2, 2, 0), (1, 1, 1))])
    assert backwards[2] == 0 and (backwards[:2] > 0).all()
    assert weights_of([]).tolist() == [1, 0, 0]
    # Without the limit, the first two weights are negative. With it, only the first one is 0.
    alike = 4 * np.array([[1, 0.5, 0.8], [0.5, 1, 0.8], [0.8, 0.8, 1]])
    task = TaskNovelty(images=50, classes=50, known=(0,) * 3, unknown=(0, 0.5, 0.5), products=tuple(alike.flatten()))
    parts = np.linalg.cholesky(50 * alike / 4 + np.eye(3))
    target = 50 * np.array([0, 0.5, 0.5]) / 4 + USUAL
    expected = optimize.nnls(parts.T, np.linalg.solve(parts, target))[0] / 2
    assert np.count_nonzero(expected) == 2
    np.testing.assert_allclose(weights_of([task]).numpy(), expected, rtol=1e-9)


def test_new_tasks_weigh_more_and_uninformative_signs_nearly_nothing():
    old, new = record((0, 0, 0), (3, 0, 0), (1, 1, 1)), record((0, 0, 0), (0, 3, 0), (1, 1, 1))
    weights = weights_of([old, new])
    assert weights[1] > weights[0] > 5 * weights[2] >= 0


def test_texts_are_used_if_every_class_has_one_image():
    rows, labels, texts, others = world(each=1)
    classifier = in_tasks("bayes", rows, labels, rows + 0.01 * texts, increment=CLASSES)
    assert classifier.roc_area is None and weights_of(classifier.novelty_tasks)[2] > 0
    with pytest.raises(ValueError, match="takes 19 images .*, and there are 0"):
        classifier.refused(others, 0.05)


@pytest.mark.parametrize("classes", [10, 13])
def test_probabilities_get_no_weight_if_every_class_has_one_image(classes):
    """No image can be left out, so they say nothing. 13 classes do not form ten parts of equal size."""
    rows, labels, texts = clusters(classes * [1], 16)
    classifier = in_tasks("bayes", rows, labels, texts, increment=classes)
    evidence, odds, nearest = weights_of(classifier.novelty_tasks).tolist()
    assert odds == 0 and evidence + nearest > 0


def test_roc_area_predicts_the_area_on_unknown_classes():
    counts = [12] * 40
    rows, labels, texts = clusters(counts, 16, spread=0.6)
    known, seen = labels < 20, torch.arange(len(labels)) % 12 < 8
    classifier = in_tasks("lda", rows[known & seen], labels[known & seen], texts[:20], increment=5)
    own, other = classifier.novelty(rows[known & ~seen]), classifier.novelty(rows[~known])
    came = float((other[:, None] > own).double().mean())
    low, high = classifier.roc_interval
    assert came > 0.75 and classifier.roc_area == pytest.approx(came, abs=0.07)
    assert low < classifier.roc_area < high and low < came < high and 0.03 < high - low < 0.3
    for share in (0.05, 0.2):
        came = float(classifier.refused(rows[~known], share).double().mean())
        # Both are means over 20 classes, whose shares deviate by 0.07: two standard errors of the difference.
        assert found(classifier.novelty_tasks, share) == pytest.approx(came, abs=2 * 0.07 * (2 / 20) ** 0.5)
        above = weights = 0.0
        for age, each in enumerate(reversed(classifier.novelty_tasks)):
            weight, least = FADING**age * each.images, novelty_threshold(classifier.novelty_tasks, share)
            above += weight * sum(value > least for value in each.unfamiliar) / len(each.unfamiliar)
            weights += weight
        assert found(classifier.novelty_tasks, share) == pytest.approx(above / weights, rel=1e-12)
    assert found(classifier.novelty_tasks, 0.001) is None, "too few images for this share"


def of_classes(numbers, classes, most, apart, between=1.0):
    """Return novelties, weights and labels of up to `most` images of each class, some novelties equal."""
    labels = np.arange(classes).repeat(numbers.integers(most // 2, most + 1, classes))
    values = apart + between * numbers.normal(size=classes)[labels] + numbers.normal(size=len(labels))
    return tuple(map(torch.from_numpy, (values.round(1), 1 / np.bincount(labels)[labels], labels)))


def area_of(known, unknown):
    """Return the weighted area of lists of (novelty, weight), as a literal mean over all pairs."""
    pairs = [(w * v, (x > y) + (x == y) / 2) for x, w in unknown for y, v in known]
    return sum(weight * won for weight, won in pairs) / sum(weight for weight, _ in pairs)


def test_area_differs_between_classes_as_in_a_literal_version_and_a_bootstrap():
    numbers = np.random.default_rng(0)
    known, unknown = of_classes(numbers, 30, 6, 0.0), of_classes(numbers, 30, 6, 1.0)
    area, between = area_by_classes(known, unknown)
    sides = [
        [[(float(x), float(w)) for x, w, y in zip(*side, strict=True) if y == c] for c in range(30)]
        for side in (known, unknown)
    ]
    flat = [[pair for of in side for pair in of] for side in sides]
    assert area == pytest.approx(area_of(*flat), rel=1e-12)
    expected = 0.0
    for of_known, of_unknown in zip(*sides, strict=True):
        expected += (area_of(of_known, flat[1]) - area + area_of(flat[0], of_unknown) - area) ** 2
    assert between == pytest.approx(expected, rel=1e-9)  # every class has 1/30 of the weight of a side
    tables = np.array([[area_of(a, b) for b in sides[1]] for a in sides[0]])
    drawn = [tables[np.ix_(draw, draw)].mean() for draw in numbers.integers(0, 30, (4000, 30))]
    assert (between / 29 / 30) ** 0.5 == pytest.approx(np.std(drawn), rel=0.08)


def test_interval_of_the_area_holds_for_new_draws_of_classes():
    numbers, held = np.random.default_rng(1), 0
    exact = float(stats.norm.cdf(1.0 / 2))  # novelties differ by 1, with a variance of 2 on each side
    for _ in range(300):
        known, unknown = of_classes(numbers, 15, 8, 0.0), of_classes(numbers, 15, 8, 1.0)
        area, between = area_by_classes(known, unknown)
        task = record((0,) * 3, (1,) * 3, (1,) * 3, 15).model_copy(update={"area": area, "between": between})
        low, high = roc_interval([task])
        held += low <= exact <= high
    assert 0.92 <= held / 300 <= 0.995


def test_interval_of_the_area_of_several_tasks():
    made = record((0,) * 3, (1,) * 3, (1,) * 3, 4)
    old, new = (made.model_copy(update={"area": area, "between": b}) for area, b in ((0.8, 0.06), (0.9, 0.02)))
    weights = np.array([FADING, 1.0]) / (1 + FADING)
    area, classes = weights @ [0.8, 0.9], 1 / (weights @ weights / 4)
    error = math.sqrt(0.08 / 6 / classes + ((area - 0.5) / (classes + 1)) ** 2)
    away = stats.t.ppf(0.975, 6) * error
    assert roc_interval([old, new]) == pytest.approx((area - away, min(1, area + away)), rel=1e-12)
    low, high = roc_interval([made.model_copy(update={"area": 1.0, "between": 0.0})])
    assert 0.5 < low < 0.9 and high == 1, "four classes that are told perfectly say little about a fifth"
    assert roc_interval([made]) is None and roc_interval([old, made.model_copy(update={"area": 0.9})]) is None
    assert roc_interval([old.model_copy(update={"classes": 1})]) is None


def test_other_classifiers_use_the_largest_probability():
    rows, labels, _, others = world()
    classifier = in_tasks("ridge", rows, labels)
    assert sums_of(classifier.rule, classifier.state) is None and classifier.roc_area is None
    sure = classifier.probabilities(others).amax(dim=1)
    assert torch.equal(classifier.novelty(others), 1 - sure.double())  # the same products of the same rows
    assert torch.equal(classifier.refused(others, 0.3), sure < classifier.rejection_threshold(0.3))


def test_classifiers_of_a_learner_compute_the_evidence_of_left_out_images_once(monkeypatch):
    rows, labels, _, _ = world()
    made, real = [], Evidence.__init__
    monkeypatch.setattr(Evidence, "__init__", lambda self, sums: made.append(1) or real(self, sums))
    closing = ClosingPass(tuple("abcde"), rows, labels)

    def learned(*specs):
        made.clear()
        return learn_task({spec: make_classifier(spec, DIM) for spec in specs}, closing), len(made)

    together, count = learned("lda", "lda:prior_images=3.0", "bayes:features=0")
    alone = [learned(spec) for spec in together]
    assert count == max(number for _, number in alone) > 0
    for each, _ in alone:
        ((spec, classifier),) = each.items()
        assert classifier.novelty_tasks == together[spec].novelty_tasks


@pytest.mark.parametrize(("most", "number"), [(1000, 10), (8, 3)])
def test_large_tasks_are_judged_on_fewer_parts(most, number, monkeypatch):
    """A literal record: two of five classes are left out, and a tenth of the images, or more with few parts."""
    monkeypatch.setattr(novelty, "MOST_CLASSES", 2)
    monkeypatch.setattr("dulbe_peft.classifiers.leaving.MOST", most)
    rows, labels, _, _ = world()
    (task,) = in_tasks("lda", rows, labels).novelty_tasks
    rows = rows.double()
    left = choose(rows, labels, None, labels.bincount())
    chosen, chosen_labels = rows[left.rows], left.labels
    order = chosen_labels.argsort(stable=True)
    known, unknown = {c: [] for c in range(CLASSES)}, {c: [] for c in (0, 1)}
    for place, row in enumerate(chosen[order]):
        gone = chosen[order][place % number :: number]
        left = torch.tensor([not bool((each == gone).all(dim=1).any()) for each in rows])
        label = int(chosen_labels[order][place])
        for stays, side in ((left, known), (labels != label, unknown)):
            if label in side:
                there = labels[stays].unique(return_inverse=True)[1]
                of = sums(rows[stays], there)
                side[label].append(literal(row, of.means, of.counts, of.scatter, of.freedom))
    for mean, each in ((task.known[0], known), (task.unknown[0], unknown)):
        # A classifier normalises the features again in float32, so they differ by about 1e-7 of their length.
        assert mean == pytest.approx(np.mean([np.mean(values) for values in each.values() if values]), rel=1e-4)
    assert task.classes == len(chosen_labels.unique()) and task.images == len(chosen)


@pytest.mark.parametrize("spec", ["lda", "gda"])
def test_left_out_scores_are_computed_once(spec, monkeypatch):
    rows, labels, texts, _ = world()
    real, calls = LdaRule.left_out, []
    monkeypatch.setattr(LdaRule, "left_out", lambda *given: calls.append(1) or real(*given))
    expected = in_tasks(spec, rows, labels, texts).novelty_tasks
    assert len(calls) == 1
    judged = novelty.judged
    monkeypatch.setattr(novelty, "judged", lambda *given: judged(*given[:-1], None))
    assert in_tasks(spec, rows, labels, texts).novelty_tasks == expected and len(calls) == 3
