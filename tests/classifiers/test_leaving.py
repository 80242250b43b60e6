"""Which images are left out, compared with a literal choice of one image of each class after another."""

import pytest
import torch
from torch.nn import functional as F

from dulbe_peft.classifiers import leaving
from dulbe_peft.classifiers.groups import ranking

LABELS = torch.tensor([0] * 9 + [1] * 2 + [2] * 1 + [3] * 5)
COUNTS = LABELS.bincount()


@pytest.fixture
def images(generator):
    return F.normalize(torch.randn(len(LABELS), 6, generator=generator), dim=1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def literal(ranks, labels, most):
    """Rows, from the first of every class to the last."""
    queues = {
        c: sorted((labels == c).nonzero()[:, 0].tolist(), key=lambda row: ranks[row])
        for c in sorted({*labels.tolist()})
    }
    found = []
    while any(queues.values()):
        found += [queue.pop(0) for queue in queues.values() if queue]
    return {*found[:most]}


@pytest.mark.parametrize("most", [1, 3, 5, 8, 100])
def test_one_image_of_each_class_is_chosen_after_another_whatever_their_order(images, most, monkeypatch, generator):
    monkeypatch.setattr(leaving, "MOST", most)
    left = leaving.choose(images, LABELS, None, COUNTS)
    several = COUNTS[LABELS] > 1
    kept = several.nonzero()[:, 0]
    places = literal(ranking(images)[kept].tolist(), LABELS[kept], most)
    # The second image of a class never comes before the first one of another: classes 0, 1 and 3 have several.
    assert {*left.rows.tolist()} == {int(kept[place]) for place in places}
    assert torch.equal(left.labels, LABELS[left.rows])
    mixed = torch.randperm(len(LABELS), generator=generator)
    again = leaving.choose(images[mixed], LABELS[mixed], None, COUNTS)
    assert torch.equal(images[mixed][again.rows], images[left.rows])


@pytest.mark.parametrize("most", [1, 4, 6, 100])
def test_groups_are_chosen_whole_up_to_the_limit(images, most, monkeypatch):
    monkeypatch.setattr(leaving, "MOST", most)
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 5, 6, 6, 6, 7, 8])
    left = leaving.choose(images, LABELS, groups, COUNTS)
    for group in left.groups.unique():
        assert int((left.groups == group).sum()) == int((groups == group).sum())
    assert 0 < len(left.rows) <= max(most, 3), "a group that is larger than the limit is left out if it is the first"
    assert len(left.rows) == 16 or most < 16, "all but the lone class"


def test_held_out_images_are_scored_in_turn(images, monkeypatch):
    many = images.repeat_interleave(5, dim=0) + 0.1 * torch.randn(85, 6, generator=torch.Generator().manual_seed(1))
    labels = LABELS.repeat_interleave(5)
    held, every = leaving.held_out(many, labels, None)
    assert sorted(every.rows.tolist()) == held.nonzero()[:, 0].tolist() and every.labels.bincount().tolist() == [
        9,
        2,
        1,
        5,
    ]
    monkeypatch.setattr(leaving, "MOST", 7)
    fewer_held, fewer = leaving.held_out(many, labels, None)
    assert torch.equal(fewer_held, held), "the copy learns the same images"
    assert fewer.labels.bincount().tolist() == [2, 2, 1, 2]


@pytest.mark.parametrize("most", [1, 4, 100])
def test_stored_images_are_chosen_in_turn_with_their_groups(most, monkeypatch):
    monkeypatch.setattr(leaving, "MOST", most)
    learned = {"a": [b"7", b"1", b"3", b"5"], "b": [b"2", b"4", b"9"], "alone": [b"6"], "c": [b"8", b"9"]}
    chosen = leaving.by_content(learned, {b"1": 0, b"7": 0})
    # 9 was learned twice, and 1 and 7 are one group.
    turns = [(b"1", "a"), (b"2", "b"), (b"8", "c"), (b"3", "a"), (b"4", "b"), (b"5", "a"), (b"7", "a")]
    assert chosen == dict([*turns[:most], (b"7", "a")])


def test_a_group_that_does_not_fit_ends_no_choice(generator):
    """50 groups of 30 images and one of 1,500: as many of the small groups are chosen as fit."""
    groups = torch.cat([torch.arange(50).repeat_interleave(30), torch.full((1500,), 50)])
    labels = groups % 2
    images = F.normalize(torch.randn(3000, 8, generator=generator), dim=1)
    left = leaving.choose(images, labels, groups, labels.bincount())
    sizes = left.groups.unique(return_counts=True)[1]
    assert len(sizes) == leaving.MOST // 30 or sizes.max() == 1500  # the large group is chosen if it is the first one
    assert len(left.rows) >= leaving.MOST - 30
