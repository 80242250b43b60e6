"""Test which images are suggested for labelling: those of groups not learned yet, and the most uncertain ones."""

import numpy as np
import pytest
import torch
from taught import in_tasks
from torch.nn import functional as F

from dulbe_peft.photos.suggesting import suggestions

DIM = 16


def groups(*sizes, seed=0, spread=0.1):
    """Return unit features around one direction per group, and the group of each feature."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    middles = torch.eye(DIM)[: len(sizes)]
    return F.normalize(middles[labels] + spread * torch.randn(len(labels), DIM, generator=generator), dim=1), labels


def test_without_a_classifier_largest_groups_come_first():
    features, labels = groups(40, 10, 30, 20)
    suggested = suggestions(features, 4)
    assert [int(labels[s.row]) for s in suggested] == [0, 2, 3, 1]
    assert [s.group for s in suggested] == [1, 2, 3, 4] and suggested[0].reason == "typical, with 39 more alike"
    assert all(s.proposed == "" and s.novelty is None for s in suggested)
    for s in suggested:  # each is central in its group
        members = features[labels == labels[s.row]]
        middle = F.normalize(members.mean(dim=0), dim=0)
        assert features[s.row] @ middle >= (members @ middle).quantile(0.9)


def test_one_image_of_each_novel_group_is_suggested():
    features, labels = groups(30, 30, 30, 30)
    known = labels < 2
    classifier = in_tasks("lda", features[known], labels[known])
    fresh, group = groups(30, 30, 30, 30, seed=1)
    suggested = suggestions(fresh, 4, classifier)
    typical = [s for s in suggested if s.group]
    assert {int(group[s.row]) for s in typical} == {2, 3}
    assert all(s.reason.startswith("unlike anything learned") and s.proposed == "" for s in typical)
    assert suggested[0].group == 1
    assert min(s.novelty for s in typical) > float(classifier.novelty(fresh[group < 2]).max())


def test_most_uncertain_image_is_suggested_with_its_two_best_classes():
    features, labels = groups(30, 30)
    classifier = in_tasks("lda", features, labels)
    between = F.normalize(torch.eye(DIM)[0] + torch.eye(DIM)[1], dim=0)
    fresh = torch.cat([groups(20, 20, seed=1)[0], between[None]])
    unsure = next(s for s in suggestions(fresh, 6, classifier) if s.group is None)
    shares = classifier.probabilities(fresh)
    assert unsure.row == int((shares.amax(1) - shares.amin(1)).argmin())
    assert " or class " in unsure.reason


def test_unsure_and_unknown_are_two_words():
    """An image between two classes is unsure, and has a proposed class; one far from all is perhaps unknown."""
    features, labels = groups(30, 30)
    classifier = in_tasks("lda", features, labels)
    ways = F.normalize(torch.eye(DIM)[0] + torch.eye(DIM)[1], dim=0), torch.eye(DIM)[DIM - 1]
    fresh = torch.cat([groups(20, 20, seed=1)[0], torch.stack(ways)])
    found = {s.row: s for s in suggestions(fresh, len(fresh), classifier) if s.group is None}
    refused = classifier.refused(fresh, 0.05).tolist()
    assert refused[41] and not all(refused)
    for row, suggestion in found.items():
        assert suggestion.reason.startswith("perhaps unknown, most like class " if refused[row] else "unsure: class ")
        assert (suggestion.proposed == "") == refused[row]


def test_weak_classifier_suggests_random_instead_of_uncertain_images():
    """The margin is not informative if the right class is seldom one of the two best; random images are better."""
    features, labels = groups(*[8] * 6)
    weak = in_tasks("lda", features, labels[torch.randperm(48, generator=torch.Generator().manual_seed(0))])
    strong = in_tasks("lda", features, labels)
    fresh = groups(*[20] * 6, seed=1, spread=0.5)[0]
    assert float(weak.probabilities(fresh).amax(1).mean()) < 0.5 < float(strong.probabilities(fresh).amax(1).mean())
    rows = {}
    for name, classifier in (("weak", weak), ("strong", strong)):
        drawn = [s for s in suggestions(fresh, 20, classifier) if s.group is None]
        assert all(s.reason.startswith("at random: ") == (classifier is weak) for s in drawn)
        rows[name] = [s.row for s in drawn]
    margins = weak.probabilities(fresh).topk(2, dim=1).values
    least = (margins[:, 0] - margins[:, 1]).argsort()[: len(rows["weak"])]
    assert len(set(rows["weak"]) & set(least.tolist())) < len(least) / 2
    assert suggestions(fresh, 20, weak) == suggestions(fresh, 20, weak), "the same call gives the same result"


def test_probabilities_that_are_not_calibrated_make_no_image_uncertain():
    """With one image of each class, those of `lda` are near 1 and wrong."""
    features, labels = groups(1, 1, 1, 1, spread=0.5)
    classifier = in_tasks("lda", features, labels)
    fresh = groups(10, 10, 10, 10, seed=1, spread=0.5)[0]
    assert not classifier.calibrated and float(classifier.probabilities(fresh).amax(dim=1).mean()) > 0.5
    reasons = [s.reason for s in suggestions(fresh, 8, classifier) if s.group is None]
    assert reasons and all(reason.startswith("at random") for reason in reasons)


def test_suggestions_contain_no_copies_and_no_image_twice():
    features, labels = groups(5, 5)
    classifier = in_tasks("lda", features, labels)
    fresh = groups(6, 6, seed=1)[0]
    doubled = fresh.repeat(3, 1)
    for given in (None, classifier):
        rows = [s.row for s in suggestions(doubled, 36, given)]
        units = doubled[rows]
        assert len(rows) == len(set(rows)) <= 12
        assert float((units @ units.T - 2 * torch.eye(len(rows))).max()) < 1 - 1e-4
    assert len(suggestions(doubled, 36, classifier)) == 12, "all different images are suggested"
    between = F.normalize(torch.eye(DIM)[:1] + torch.eye(DIM)[1:2], dim=1)
    many = torch.cat([between.expand(60, DIM), fresh])
    assert len(suggestions(many, 10, classifier)) == 10, "60 uncertain copies do not use up the suggestions"
    assert suggestions(fresh[:0], 5, classifier) == []
    with pytest.raises(ValueError, match="count must be at least 1"):
        suggestions(fresh, 0)


def test_classifier_of_a_single_class_gives_suggestions():
    features, labels = groups(10, 10)
    for spec in ("prototype", "lda"):
        classifier = in_tasks(spec, features[labels == 0], labels[labels == 0])
        suggested = suggestions(groups(8, 8, seed=2)[0], 6, classifier)
        assert len(suggested) == 6 and all(np.isfinite(s.novelty) for s in suggested)
        drawn = [s for s in suggested if s.group is None]
        assert drawn and all(s.reason == "at random: class 0 100%" for s in drawn), "the probability says nothing"


def test_each_item_is_suggested_once_before_any_is_again():
    """Ten items with one to seven frames: without groups, those with many frames are suggested several times."""
    sizes = torch.arange(10) % 7 + 1
    items, noise = groups(*[1] * 10, spread=0.4)[0], 0.02 * torch.randn(int(sizes.sum()), DIM)
    of = torch.repeat_interleave(torch.arange(10), sizes)
    frames = F.normalize(items[of] + noise, dim=1)
    features, labels = groups(10, 10)
    for classifier in (None, in_tasks("lda", features, labels)):
        first = suggestions(frames, 20, classifier, groups=of)
        names = suggestions(frames, 20, classifier, groups=[f"item {number}" for number in of.tolist()])
        assert first == names and len({s.row for s in first}) == 20
        assert sorted(of[[s.row for s in first[:10]]].tolist()) == list(range(10))
        for s in first[:10]:  # its central frame stands for an item
            mine = frames[of == of[s.row]]
            assert frames[s.row] @ mine.sum(dim=0) == pytest.approx(float((mine @ mine.sum(dim=0)).max()), abs=1e-5)
        later = suggestions(frames, 10, classifier, groups=of, labelled={3, 5})
        assert set(of[[s.row for s in later[-2:]]].tolist()) == {3, 5}
        assert suggestions(frames, 10, classifier, groups=of, labelled=torch.tensor([3, 5])) == later
        own = list(range(len(frames)))
        assert suggestions(frames, 5, classifier, groups=own) == suggestions(frames, 5, classifier)
    assert len(set(of[[s.row for s in suggestions(frames, 10)]].tolist())) < 10
    assert suggestions(frames[:0], 5, groups=[]) == []
    with pytest.raises(ValueError, match="one per image"):
        suggestions(frames, 5, groups=[1, 2])
