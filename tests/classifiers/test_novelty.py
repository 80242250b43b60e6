"""How unlike all that was learned an image is: against literal float64 versions, whatever changed the classifier."""

import numpy as np
import pytest
import torch
from taught import clusters, in_tasks

from dulbe_peft.classifiers.covariance import oas_shrinkage
from dulbe_peft.classifiers.novelty import Distances, distances, judged

DIM, CLASSES, EACH = 6, 5, 9


def world(each=EACH):
    """Unit features and labels of some classes, texts of these, and features of as many other classes."""
    rows, labels, texts = clusters(2 * CLASSES * [each], DIM, spread=0.5)
    known = labels < CLASSES
    return rows[known], labels[known], texts[:CLASSES], rows[~known]


def shrunk(scatter, freedom, share=None, variance=None):
    """(1 - s) C + s (tr C / d) I of C = scatter / freedom, inverted."""
    sample = scatter / freedom
    share = oas_shrinkage(sample, freedom) if share is None else share
    variance = float(sample.trace()) / len(sample) if variance is None else variance
    return torch.linalg.inv((1 - share) * sample + share * variance * torch.eye(len(sample), dtype=torch.float64))


def scatter_of(rows, labels):
    total = torch.zeros(DIM, DIM, dtype=torch.float64)
    for c in labels.unique():
        own = rows[labels == c]
        for row in own:
            total += torch.outer(row - own.mean(dim=0), row - own.mean(dim=0))
    return total


def literal(z, rows, labels, extra=None, freedom=None):
    """The novelty of one image, from all learned ones; `extra` scatter of classes that are gone."""
    z, rows = z.double(), rows.double()
    means = [rows[labels == c].mean(dim=0) for c in labels.unique()]
    within = scatter_of(rows, labels) + (0 if extra is None else extra)
    middle, number = rows.mean(dim=0), len(rows)
    counts = labels.unique(return_counts=True)[1]
    between = sum(n * torch.outer(m - middle, m - middle) for n, m in zip(counts, means, strict=True))
    p = shrunk(within, number - len(means) if freedom is None else freedom)
    q = shrunk(within + between, number - 1)
    return float(min((z - m) @ p @ (z - m) for m in means) - (z - middle) @ q @ (z - middle))


SPECS = ["lda", "gda", "bayes:features=3", "bayes:exact_forgetting=False,features=0"]


@pytest.mark.parametrize("spec", SPECS)
def test_novelty_is_the_literal_one_also_after_further_images(spec):
    rows, labels, texts, others = world()
    first = torch.arange(len(labels)) % EACH < 4
    classifier = in_tasks(spec, rows[first], labels[first], texts, [4, 2, 0, 3, 1], increment=1)
    order = torch.tensor([2, 4, 1, 3, 0])  # places of the classes
    for known in (first, first | ~first):
        expected = [literal(z, rows[known], labels[known]) for z in others]
        np.testing.assert_allclose(classifier.novelty(others).numpy(), expected, rtol=1e-4, atol=1e-5)
        classifier.update_classes(rows[~first], order[labels[~first]])


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_forgotten_is_as_new_as_the_sums_say(spec):
    rows, labels, texts, _ = world()
    classifier = in_tasks(spec, rows, labels, texts, increment=1)
    before = classifier.novelty(rows[labels == 2])
    classifier.forget_class("class 2")
    kept = labels != 2
    # The class's scatter stays in W where the sums cannot tell it apart.
    gone = scatter_of(rows[~kept].double(), labels[~kept])
    stays = {} if spec == "bayes:features=3" else {"extra": gone, "freedom": len(rows) - CLASSES}
    found = classifier.novelty(rows[~kept])
    expected = [literal(z, rows[kept], labels[kept], **stays) for z in rows[~kept]]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert found.mean() > before.mean() + 1


def test_an_image_that_is_left_out_is_as_if_it_or_its_class_had_not_been_learned():
    rows, labels, *_ = world()
    rows = rows.double()
    means = torch.stack([rows[labels == c].mean(dim=0) for c in range(CLASSES)])
    whole = Distances(means, labels.bincount(), scatter_of(rows, labels), len(rows) - CLASSES)
    known, unknown = whole.left_out(rows, labels)
    within, total = whole.within, whole.total
    all_rows = (rows - rows.mean(dim=0)).T @ (rows - rows.mean(dim=0))
    variances = [float(s.trace()) / f / DIM for s, f in ((scatter_of(rows, labels), within.freedom), (all_rows, 44))]

    def distances_of(row, kept, centres, middle, between):
        left = scatter_of(rows[kept], labels[kept])
        p = shrunk(left, within.freedom, within.share, variances[0])
        q = shrunk(left + between, total.freedom, total.share, variances[1])
        return [(row - m) @ p @ (row - m) for m in centres], (row - middle) @ q @ (row - middle)

    for i in range(0, len(rows), 4):
        kept, own, n = torch.arange(len(rows)) != i, int(labels[i]), EACH
        centres = [rows[kept & (labels == c)].mean(dim=0) for c in range(CLASSES)]
        middle = rows[kept].mean(dim=0)
        counts = labels[kept].bincount()
        between = sum(k * torch.outer(m - middle, m - middle) for k, m in zip(counts, centres, strict=True))
        near, far = distances_of(rows[i], kept, centres, middle, between)
        near[own] *= (1 + 1 / n) / (1 + 1 / (n - 1))
        assert float(known[i]) == pytest.approx(float(min(near) - far), rel=1e-8)
        others = [c for c in range(CLASSES) if c != own]
        middle = rows[labels != own].mean(dim=0)
        between = sum(n * torch.outer(means[c] - middle, means[c] - middle) for c in others)
        near, far = distances_of(rows[i], kept, [means[c] for c in others], middle, between)
        assert float(unknown[i]) == pytest.approx(float(min(near) - far), rel=1e-8)


def test_one_image_a_class_has_one_multiple_of_the_identity_for_both():
    rows, labels, _, others = world(each=1)
    classifier, centre = in_tasks("lda", rows, labels), rows.double().mean(dim=0)
    squares = torch.cdist(others.double(), rows.double()).square().amin(dim=1)
    expected = (squares - (others - centre).square().sum(dim=1)).numpy()
    found = classifier.novelty(others)
    np.testing.assert_allclose((found / found[0]).numpy(), expected / expected[0], rtol=1e-4, atol=1e-5)
    assert judged(classifier, rows, labels) is None
    with pytest.raises(ValueError, match="takes 19 images .*, and there are 0"):
        classifier.refused(others, 0.05)


def test_others_go_by_their_largest_probability():
    rows, labels, _, others = world()
    classifier = in_tasks("ridge", rows, labels)
    assert distances(classifier) is None and classifier.roc_area is None
    sure = classifier.probabilities(others).amax(dim=1)
    assert torch.equal(classifier.novelty(others), 1 - sure.double())  # the same products, of the same rows
    assert torch.equal(classifier.refused(others, 0.3), sure < classifier.rejection_threshold(0.3))
