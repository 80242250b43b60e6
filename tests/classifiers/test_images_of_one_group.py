"""Images of a group are left out together: compared with classifiers that really did not learn the group."""

import math

import numpy as np
import pytest
import reference
import torch
from taught import CLASSES, DIM, KINDS, SCALE, clusters, digits
from torch.nn import functional as F

from dulbe_peft.classifiers import make_classifier
from dulbe_peft.classifiers.groups import check_groups, places_among, rows_by_group
from dulbe_peft.classifiers.leaving import hold_back, in_parts, in_turn
from dulbe_peft.classifiers.ridge import POWER

EXACT = [
    *("prototype", "text", "lda", "lda:shrinkage=0.2", "gda:alpha=2", "bridge", "ridge:ridge=0.5"),
    "ranpac:features=60,ridge=20",
]  # `bayes` gives the class that lost images the weight of all of them; test_bayes.py compares it


def taught(spec, images, labels, groups=None, texts=digits.texts):
    classifier = make_classifier(spec, images.shape[1], SCALE)
    names = [str(label) for label in range(int(labels.max()) + 1)]
    classifier.add_classes(names, images, labels, texts, groups=groups)
    return classifier


@pytest.fixture(scope="module")
def bursts():
    """Return 2 to 9 images of each digit, their labels, and groups of one to four images, some with two classes."""
    rows = torch.cat([(digits.labels == c).nonzero()[: 2 + c % 8, 0] for c in range(CLASSES)])
    labels = digits.labels[rows]
    groups = torch.randint(0, 14, (len(rows),), generator=torch.Generator().manual_seed(2))
    groups = torch.where(places_among(labels) == 0, 100 + labels, groups)  # a group of its own per class
    return F.normalize(digits.images[rows], dim=1), labels, groups


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("spec", EXACT)
def test_scores_without_a_group_are_those_of_a_classifier_that_did_not_learn_it(spec, bursts):
    images, labels, groups = bursts
    classifier = taught(spec, images, labels)
    usable = groups < 100
    found = classifier.left_out(images[usable], labels[usable], groups[usable]).double()
    expected = torch.zeros_like(found)
    for rows in rows_by_group(groups[usable]):
        gone = usable.nonzero()[rows, 0]
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill(0, gone, False)
        twin = taught(spec, images[rest], labels[rest])
        if spec == "bridge":  # the reliabilities stay
            twin.install({"reliability": classifier.reliability})
        expected[rows] = twin(images[gone]).double()
        if spec.startswith(("ridge", "ranpac")):  # the mean of the counts stays
            expected[rows] *= (len(labels) / int(rest.sum())) ** POWER
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shrinkage, prior", [(None, 1.0), (0.2, 1.0), (None, 0.0)])
@pytest.mark.parametrize("large", [False, True])
def test_lda_and_gda_without_a_group_equal_the_literal_formula_of_all_other_images(shrinkage, prior, large):
    """Small groups are left out by a correction of low rank, and large ones by another inverse.

    The features have entries of 1/8 and -1/8, so they have exactly unit length in float32.
    """
    generator = torch.Generator().manual_seed(0)
    labels, texts = torch.arange(60) % 6, torch.randn(6, 64, generator=generator).sign() / 8
    images = (8 * texts[labels] + torch.randn(60, 64, generator=generator)).sign() / 8
    groups = torch.arange(60) // 30 if large else torch.randint(0, 15, (60,), generator=generator)
    alpha = 2.0
    settings = f"shrinkage={shrinkage or 'oas'},prior_images={prior}"
    lda, gda = (
        taught(spec, images, labels, texts=texts) for spec in (f"lda:{settings}", f"gda:alpha={alpha},{settings}")
    )
    found, mixed = (each.left_out(images, labels, groups) for each in (lda, gda))
    assert found.dtype == mixed.dtype == torch.float64
    for rows in rows_by_group(groups):
        rest = torch.ones(len(labels), dtype=torch.bool).index_fill(0, rows, False)
        assert large == (2 * (len(rows) + len(labels[rows].unique())) >= 64)
        expected = reference.lda_logits(images[rest], labels[rest].tolist(), images[rows], shrinkage, prior)
        by_text = SCALE * images[rows].double() @ texts.double().T
        # float64, times a condition number of 1e3 and sums of 64 products.
        bound = 2.0**-52 * 1e3 * 64 * float(expected.abs().max())
        torch.testing.assert_close(found[rows], expected, rtol=0, atol=bound)
        torch.testing.assert_close(mixed[rows], (by_text + alpha * expected) / alpha, rtol=0, atol=2 * bound)


@pytest.mark.parametrize("spec", ["lda", "gda:alpha=2"])
def test_lda_without_a_group_may_be_left_with_one_image_or_with_equal_images_of_each_class(spec):
    """Then the covariance is I / tau, as for a classifier that learned only these images."""
    images, labels, texts = clusters(4 * [1], DIM)
    others = F.normalize(images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1)), dim=1)
    for kept in (1, 2):  # equal images
        every = torch.cat([*[images] * kept, others])
        classifier = taught(spec, every, labels.repeat(kept + 1), texts=texts)
        found = classifier.left_out(others, labels, torch.zeros(len(labels), dtype=torch.int64))
        twin = taught(spec, every[: -len(labels)], labels.repeat(kept), texts=texts)(others).double()
        torch.testing.assert_close(found, twin, rtol=1e-5, atol=1e-4)


def test_pooled_head_leaves_the_group_out_of_the_mean_of_its_class(bursts):
    images, labels, groups = bursts
    head = taught("pooled_bridge", images, labels)
    usable = groups < 100
    found, weights = head.left_out(images[usable], labels[usable], groups[usable]).double(), head.depth_weights
    weights, depths = weights.tolist(), head.depths.double().tolist()
    for place, row in enumerate(usable.nonzero()[:, 0].tolist()):
        label, same = labels[row], labels == labels[row]
        rest = same & (groups != groups[row])
        length = float(images[same].double().sum(dim=0).norm())
        u = int(same.sum()) / int(rest.sum()) * images[rest].double().sum(dim=0) / length
        e = F.normalize(digits.texts[label].double(), dim=0)
        theta = math.acos(float(F.normalize(u, dim=0) @ e))
        points = [math.sin((1 - a) * theta) * u + math.sin(a * theta) * e for a in depths]
        mixed = sum(w * float(images[row].double() @ p) for w, p in zip(weights, points, strict=True))
        assert float(found[place, label]) == pytest.approx(SCALE * mixed / math.sin(theta), abs=2e-3)


@pytest.mark.parametrize("spec", ["bayes", "lda", "gda", "pooled_bridge", "ridge"])
def test_copies_in_one_group_do_not_vouch_for_each_other(spec):
    """Three near copies of each image in a group: without the groups, each is recognised by the others."""
    generator = torch.Generator().manual_seed(0)
    centres, noise = (torch.randn(number, 40, generator=generator) for number in (6, 400))
    owned, truth = torch.arange(6).repeat_interleave(5), torch.arange(370) % 6
    items, tests = centres[owned] + 2 * noise[:30], F.normalize(centres[truth] + 2 * noise[30:], dim=1)
    frames = F.normalize(items.repeat(3, 1) + 0.2 * torch.randn(90, 40, generator=generator), dim=1)
    texts = F.normalize(centres + 2 * torch.randn(6, 40, generator=generator), dim=1)
    owners = [f"item {number}" for number in range(30)] * 3
    plain, grouped = (taught(spec, frames, owned.repeat(3), groups, texts) for groups in (None, owners))
    assert grouped.calibration[0].worth <= 30
    errors = []
    for each in (plain, grouped):
        largest, best = each.probabilities(tests).max(dim=1)
        errors.append(float(largest.mean()) - float((best == truth).double().mean()))
    assert errors[1] < errors[0] - 0.02, "with the groups, probabilities are less overconfident"


@pytest.mark.parametrize("spec", ["bayes", "lda", "prototype", "ridge"])
def test_groups_of_single_images_are_no_groups(spec):
    images, labels, texts = clusters(6 * [5], DIM)
    plain, grouped = (taught(spec, images, labels, g, texts) for g in (None, list(range(len(labels)))))
    assert torch.equal(plain(images), grouped(images)) and plain.calibration == grouped.calibration


def test_a_class_in_one_group_is_like_a_class_with_one_image():
    images, labels, _ = clusters(6 * [5], DIM)
    groups = torch.where(labels == 3, 3, 100 + torch.arange(len(labels)))
    classifier = taught("lda", images, labels, groups, None)
    assert classifier.calibration[0].images == 25
    everything = taught("lda", images, labels, labels, None)
    assert not everything.calibrated and "no image could be left out" in everything.doubt


def test_parts_do_not_divide_groups_and_leave_each_class_an_image(bursts):
    _, labels, groups = bursts
    counts = labels.bincount()
    parts = in_parts(labels, groups, 4, counts)
    for part in range(4):
        assert (labels[parts == part].bincount(minlength=CLASSES) < counts).all()
    place = {group: set(parts[groups == group].tolist()) - {-1} for group in groups.tolist()}
    assert all(len(found) <= 1 for found in place.values())
    held = hold_back(torch.randn(len(labels), 3), labels, groups)
    assert held.any() and (labels[~held].bincount(minlength=CLASSES) > 0).all()


@pytest.mark.parametrize(
    "wrong, message", [([1, 2], "one per image"), ([[1]] * 6, "one per image"), ([0.5] * 6, "integers")]
)
def test_wrong_groups_are_refused(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check_groups(wrong, 6)
    for missing in (None, float("nan")):
        with pytest.raises(TypeError, match="give an image without a group its own"):
            check_groups(["a", missing, missing], 3)
    assert check_groups(["a", "b", "a"], 3).tolist() == [0, 1, 0] and check_groups(np.arange(3), 3) is None


def test_few_of_many_photographs_show_all_items():
    """Each class has seven items with up to 40 photographs each, of which 256 are left out."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 8, (1200,), generator=generator)
    groups = 7 * labels + torch.multinomial(torch.tensor([2.0, 2, 2, 2, 2, 8, 8]), 1200, True, generator=generator)
    shown = in_turn(labels, 256, groups)
    counts = groups[shown].bincount(minlength=56)
    assert counts.min() >= 4 and counts.max() <= 5, "32 photographs of each class, from its seven items in turn"
    assert in_turn(labels, 1200, groups).sort().values.tolist() == list(range(1200))


def test_wrong_labels_of_a_few_items_a_class_are_told_whatever_the_number_of_photographs():
    """Nine classes with six items, of which three have most photographs, and so most of any 256."""
    generator = torch.Generator().manual_seed(1)
    owners = torch.arange(54) % 9
    shown = torch.randn(9, 40, generator=generator)[owners] + torch.randn(54, 40, generator=generator)
    given = owners.clone()
    given[:3] = (owners[:3] + 1) % 9
    items = torch.arange(54).repeat_interleave(torch.tensor([60] * 27 + [3] * 27))
    frames = shown[items] + 0.2 * torch.randn(len(items), 40, generator=generator)
    classifier = make_classifier("bayes", 40, 30.0)
    names = [f"class {n}" for n in range(9)]
    classifier.add_classes(names, F.normalize(frames, dim=1), given[items], groups=items)
    share, low, high = classifier.wrong_labels
    assert low <= 3 / 54 <= high < 0.5 and share < 0.2
