"""Wrong labels that go to similar classes, against a literal search."""

import math

import pytest
import torch
from scipy.interpolate import PchipInterpolator

from dulbe_peft.classifiers import confusion
from dulbe_peft.classifiers.calibration import WRONG


def pairs(share: float, number: int = 400, sharpness: float = 2.0, seed: int = 0):
    """Return p, (n, 6), of images of three pairs of similar classes, their labels, and the right classes.

    p is exact: the images are points in three dimensions, and only the third sign of a pair's classes differs.
    A share of the labels, at random, are those of the other class of the pair.
    """
    generator = torch.Generator().manual_seed(seed)
    truth = torch.arange(number) % 6
    centres = torch.cat(
        [torch.eye(3).repeat_interleave(2, dim=0) * 4, sharpness * torch.tensor([[-1.0], [1.0]] * 3)], 1
    )
    points = centres[truth] + torch.randn(number, 4, generator=generator)
    p = (-torch.cdist(points.double(), centres.double()).square() / 2).softmax(dim=1)
    labels = truth.clone()
    moved = torch.randperm(number, generator=generator)[: round(share * number)]
    labels[moved] = truth[moved] ^ 1
    return p, labels, truth


def literal(p, labels):
    """Search T and w one by one; return w, its interval, and the probability that each label is wrong."""
    p, labels, classes = p.tolist(), labels.tolist(), p.shape[1]
    joint = [[0.0] * classes for _ in range(classes)]
    for row, label in zip(p, labels, strict=True):
        for other in range(classes):
            if other != label:
                joint[other][label] += row[other]
    totals = [sum(row) for row in joint]

    def sides(row, label, temperature):
        logs = [math.log(max(value, 1e-300)) / temperature for value in row]
        powers = [math.exp(value - max(logs)) for value in logs]
        q, other = [value / sum(powers) for value in powers], 0.0
        for k in range(classes):
            if k != label:  # without the image itself
                share = max(0.0, joint[k][label] - row[k]) / max(1e-12, totals[k] - row[k])
                other += q[k] * (0.9 * share + 0.1 / (classes - 1))
        return q[label], other

    best = {}
    for place, w in enumerate(WRONG):
        for temperature in confusion.TEMPERATURES:
            told = -(math.log(temperature) ** 2) / 2
            for row, label in zip(p, labels, strict=True):
                own, other = sides(row, label, temperature)
                told += math.log(max(1e-300, (1 - w) * own + w * other))
            best[place] = max(best.get(place, (-math.inf, 0)), (told, temperature))
    values = [best[place][0] for place in range(len(WRONG))]
    fine = [0.9 * (step / 2000) ** 2 for step in range(2001)]
    curve = PchipInterpolator([math.sqrt(w) for w in WRONG], values)
    along = [float(curve(math.sqrt(w))) + math.log(1 - w) for w in fine]
    inside = [w for w, told in zip(fine, along, strict=True) if told >= max(along) - 1.92]
    cost = math.log(len(labels)) / 2
    place = max(best, key=lambda place: best[place][0] + math.log(1 - WRONG[place]) - (cost if place else 0))
    w, each = fine[along.index(max(along))] if place else 0.0, []
    for row, label in zip(p, labels, strict=True):
        own, other = sides(row, label, best[place][1])
        each.append(w * other / max(1e-300, (1 - w) * own + w * other))
    return w, min(inside), max(inside), each


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_share_interval_and_wrong_labels_are_those_of_a_literal_search(share):
    p, labels, _ = pairs(share, number=60)
    w, low, high, each = literal(p, labels)
    found = confusion.wrong_labels(p, labels)
    low = max(0.0, min(w, low - confusion.SURE * float((p.argmax(dim=1) != labels).double().mean())))
    assert found.shares == pytest.approx((w, low, high), abs=1e-3) and (w > 0) == (share > 0)
    chances = found.of(p, labels)
    assert chances[:, 0].tolist() == pytest.approx(each, rel=1e-9, abs=1e-12)
    assert (chances[:, 1] <= chances[:, 0]).all() and (chances[:, 0].sum() < chances[:, 2].sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("temperature", [1.0, 2.0])  # wrong labels make the temperature of p too large
def test_wrong_labels_that_go_to_the_similar_class_are_counted_and_found(seed, temperature):
    p, labels, truth = pairs(0.1, seed=seed)
    found = confusion.wrong_labels(told := (p.log() / temperature).softmax(dim=1), labels)
    assert found.shares[1] < 0.1 < found.shares[2] < 0.2
    wrong, each = labels != truth, found.of(told, labels)[:, 0]
    assert float(each.sum()) == pytest.approx(float(wrong.sum()), rel=0.4)
    assert (each[wrong] > 0.5).double().mean() > 0.7 and (each[~wrong] > 0.5).double().mean() < 0.02


@pytest.mark.parametrize("sharpness", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_classes_that_are_hard_to_tell_are_no_wrong_labels(seed, sharpness):
    p, labels, _ = pairs(0.0, sharpness=sharpness, seed=seed)
    found = confusion.wrong_labels(p, labels)
    assert found.shares[:2] == (0, 0) and float(found.of(p, labels)[:, :2].max()) == 0


def test_item_has_the_mean_of_the_log_probabilities_of_its_images():
    p, labels, _ = pairs(0.0, number=12)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])  # with labels 0 1 2 3 4 5, so that no two agree
    labels[:3], labels[6:8] = 4, 2
    found, own = confusion.by_item(p, labels, groups)
    items = sorted({*zip(groups.tolist(), labels.tolist(), strict=True)})
    assert own.tolist() == [label for _, label in items]
    for row, (group, label) in zip(found, items, strict=True):
        of = [p[at] for at in range(12) if groups[at] == group and labels[at] == label]
        means = [math.exp(sum(math.log(each[k]) for each in of) / len(of)) for k in range(6)]
        assert row.tolist() == pytest.approx([mean / sum(means) for mean in means])
