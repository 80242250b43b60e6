"""Which images to label next: groups that nothing learned stands for, and what a classifier is least sure of."""

import numpy as np
import pytest
import torch
from taught import in_tasks
from torch.nn import functional as F

from dulbe_peft.photos.suggesting import suggestions

DIM = 16


def groups(*sizes, seed=0, spread=0.1):
    """Unit features around directions of their own, and the group of each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    middles = torch.eye(DIM)[: len(sizes)]
    return F.normalize(middles[labels] + spread * torch.randn(len(labels), DIM, generator=generator), dim=1), labels


def test_without_a_classifier_each_group_has_one_the_largest_first():
    features, labels = groups(40, 10, 30, 20)
    found = suggestions(features, 4)
    assert [int(labels[one.row]) for one in found] == [0, 2, 3, 1]
    assert [one.group for one in found] == [1, 2, 3, 4] and found[0].reason == "typical, with 39 more alike"
    assert all(one.proposed == "" and one.novelty is None for one in found)
    for one in found:  # the middle of its group
        own = features[labels == labels[one.row]]
        middle = F.normalize(own.mean(dim=0), dim=0)
        assert features[one.row] @ middle >= (own @ middle).quantile(0.9)


def test_many_novel_images_come_first_one_a_group():
    features, labels = groups(30, 30, 30, 30)
    known = labels < 2
    classifier = in_tasks("lda", features[known], labels[known])
    fresh, of = groups(30, 30, 30, 30, seed=1)
    found = suggestions(fresh, 4, classifier)
    typical = [one for one in found if one.group]
    assert {int(of[one.row]) for one in typical} == {2, 3}
    assert all(one.reason.startswith("unlike anything learned") and one.proposed == "" for one in typical)
    assert found[0].group == 1 and min(one.novelty for one in typical) > float(classifier.novelty(fresh[of < 2]).max())


def test_what_a_classifier_is_least_sure_of_comes_with_its_two_best_classes():
    features, labels = groups(30, 30)
    classifier = in_tasks("lda", features, labels)
    between = F.normalize(torch.eye(DIM)[0] + torch.eye(DIM)[1], dim=0)
    fresh = torch.cat([groups(20, 20, seed=1)[0], between[None]])
    unsure = next(one for one in suggestions(fresh, 6, classifier) if one.group is None)
    shares = classifier.probabilities(fresh)
    assert unsure.row == int((shares.amax(1) - shares.amin(1)).argmin())
    assert unsure.reason.startswith("unsure: class ") and " or class " in unsure.reason


def test_who_expects_to_be_wrong_is_not_asked_what_he_is_unsure_of():
    """A margin says little where the right class is seldom among the two best: chance is better."""
    features, labels = groups(*[8] * 6)
    weak = in_tasks("lda", features, labels[torch.randperm(48, generator=torch.Generator().manual_seed(0))])
    strong = in_tasks("lda", features, labels)
    fresh = groups(*[20] * 6, seed=1, spread=0.5)[0]
    assert float(weak.probabilities(fresh).amax(1).mean()) < 0.5 < float(strong.probabilities(fresh).amax(1).mean())
    rows = {}
    for name, one in (("weak", weak), ("strong", strong)):
        drawn = [found for found in suggestions(fresh, 20, one) if found.group is None]
        assert {found.reason.split(":")[0] for found in drawn} == {"at random" if one is weak else "unsure"}
        rows[name] = [found.row for found in drawn]
    margins = weak.probabilities(fresh).topk(2, dim=1).values
    least = (margins[:, 0] - margins[:, 1]).argsort()[: len(rows["weak"])]
    assert len(set(rows["weak"]) & set(least.tolist())) < len(least) / 2
    assert suggestions(fresh, 20, weak) == suggestions(fresh, 20, weak), "the same call gives the same"


def test_no_two_are_copies_and_all_are_there_at_most_once():
    features, labels = groups(5, 5)
    classifier = in_tasks("lda", features, labels)
    fresh = groups(6, 6, seed=1)[0]
    doubled = fresh.repeat(3, 1)
    for one in (None, classifier):
        rows = [found.row for found in suggestions(doubled, 36, one)]
        units = doubled[rows]
        assert len(rows) == len(set(rows)) <= 12
        assert float((units @ units.T - 2 * torch.eye(len(rows))).max()) < 1 - 1e-4
    assert len(suggestions(doubled, 36, classifier)) == 12, "all that differ are there"
    assert suggestions(fresh[:0], 5, classifier) == []
    with pytest.raises(ValueError, match="count must be at least 1"):
        suggestions(fresh, 0)


def test_one_class_alone_and_classifiers_without_distances():
    features, labels = groups(10, 10)
    for spec in ("prototype", "lda"):
        one = in_tasks(spec, features[labels == 0], labels[labels == 0])
        found = suggestions(groups(8, 8, seed=2)[0], 6, one)
        assert len(found) == 6 and all(np.isfinite(each.novelty) for each in found)
