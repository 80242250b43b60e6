"""Which learned images are left out, to see how further images would be classified. They are chosen here alone.

If not all images can be left out, one image of each class is taken after another, so that every class counts.

in_turn        the rule above, which all the others use. `bayes` calls it with a smaller limit
choose         whole groups: the temperature of `lda`, `gda` and `pooled_bridge`, and novelty
held_out       one image of five of each class, which a copy does not learn: rules without a closed form
by_content     whole groups of the images in the feature store: estimates
in_parts       parts of the chosen images that are left out together, where each part costs a decomposition
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dulbe_peft.classifiers.groups import counts_of, places_among, ranking, together

MOST = 1000  # images of a task, or of the store, that are left out
FOLDS = 5  # of which one is held out
MOST_JUDGED = 256  # the same for `bayes`, which scores each of them with up to 70 settings and 13 temperatures


@dataclass(frozen=True, eq=False)
class Left:
    """Images that are left out, whole groups at a time.

    Attributes:
        rows: Their rows among the given images, (m,).
        labels: Their classes, (m,).
        groups: Their groups, (m,), or None if each image is a group.
        scores: (m, C), by a classifier that had not learned them, once they are known.
    """

    rows: Tensor
    labels: Tensor
    groups: Tensor | None
    scores: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, labels: Tensor, groups: Tensor | None) -> "Left":
        """Leave out some rows of images with labels, (n,), and groups, (n,)."""
        return cls(rows, labels[rows], None if groups is None else groups[rows])


def in_turn(labels: Tensor, most: int, groups: Tensor | None = None) -> Tensor:
    """Return the rows of at most `most` images with labels, (n,): the first of each class, then the second, ...

    With `groups`, (n,), one image of each group of a class comes before further ones, so that the images show as many
    items as possible.
    """
    if groups is None:
        return places_among(labels).argsort(stable=True)[:most]
    items = torch.stack([labels, groups.to(labels)], dim=1).unique(dim=0, return_inverse=True)[1]
    order = places_among(items).argsort(stable=True)
    return order[places_among(labels[order]).argsort(stable=True)[:most]]


def choose(images: Tensor, labels: Tensor, groups: Tensor | None, counts: Tensor) -> Left:
    """Choose `MOST` images in turn, each class by rank, whose class has images outside of their group.

    A group is taken whole, with its first image, and passed over if there were more than `MOST` images with it, unless
    it is the first one. `counts`, (C,), are the numbers of learned images. The result is on the device of the images.
    """
    labels = labels.to(images.device)
    groups = None if groups is None else groups.to(labels)
    rows = (counts.to(labels)[labels] > together(labels, groups)).nonzero()[:, 0]
    rows = rows[ranking(images[rows]).argsort()]
    rows = rows[in_turn(labels[rows], MOST if groups is None else len(rows))]
    if groups is not None and len(rows):
        numbers, sizes = groups[rows].unique(return_inverse=True, return_counts=True)[1:]
        first = torch.full_like(sizes, len(rows)).scatter_reduce(0, numbers, torch.arange(len(rows)).to(rows), "amin")
        taken, total, number_of = torch.zeros(len(sizes), dtype=torch.bool), 0, sizes.tolist()
        for group in first.argsort().tolist():
            if not total or total + number_of[group] <= MOST:
                taken[group], total = True, total + number_of[group]
        rows = rows[taken.to(rows.device)[numbers]]
    return Left.of(rows, labels, groups)


def held_out(images: Tensor, labels: Tensor, groups: Tensor | None) -> tuple[Tensor, Left]:
    """Return which images a copy does not learn, (n,) in bool, and at most `MOST` of them, which are scored.

    It is a share of each class, and not `MOST` images, because the copy must know all classes as the classifier does.
    """
    held = hold_back(images, labels, groups)
    rows = held.nonzero()[:, 0]
    rows = rows[ranking(images[rows]).argsort()]
    return held, Left.of(rows[in_turn(labels[rows], MOST)], labels, groups)


def hold_back(images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return a mask, (n,), of the images, (n, d), to hold out: one of every five of each class, by rank.

    With `groups`, (n,), it is one of every five groups of each class, and every class keeps a group.
    """
    if groups is not None:
        pairs = torch.stack([labels, groups.to(labels)], dim=1).unique(dim=0)
        held = torch.isin(groups.to(labels), pairs[_one_of_five(pairs[:, 0], torch.arange(len(pairs)))][:, 1])
        lost = labels[held].bincount(minlength=int(labels.max()) + 1) == labels.bincount()
        return held & ~lost[labels]
    return _one_of_five(labels, ranking(images).argsort(stable=True))


def _one_of_five(labels: Tensor, order: Tensor) -> Tensor:
    """Return a mask, (n,), of one of every five entries of each label, or of one of two to four, in this order."""
    places, order = torch.empty_like(labels), order.to(labels.device)
    places[order] = places_among(labels[order])
    return torch.where(labels.bincount()[labels] >= FOLDS, places % FOLDS == FOLDS // 2, places == 1)


def by_content(learned: Mapping[str, Sequence[bytes]], group_of: Mapping[bytes, int]) -> dict[bytes, str]:
    """Choose `MOST` learned images in turn, of classes that have several; return their classes.

    `learned` are the contents of each class's images. Each class is ordered by content, because the features, and so
    the ranks, are read after the choice. Images that were learned twice are not chosen. All images of a group are left
    out together, so all of a chosen image's group are returned.
    """
    times = Counter(chain.from_iterable(learned.values()))
    several = {name: sorted(set(contents)) for name, contents in learned.items() if len(contents) > 1}
    owner = {content: name for name, contents in several.items() for content in contents if times[content] == 1}
    numbers = {name: number for number, name in enumerate(several)}
    contents, labels = [*owner], torch.tensor([numbers[name] for name in owner.values()], dtype=torch.int64)
    chosen = {contents[row] for row in in_turn(labels, MOST).tolist()}
    groups = {group_of[content] for content in chosen if content in group_of}
    return {content: owner[content] for content in contents if content in chosen or group_of.get(content) in groups}


def in_parts(labels: Tensor, groups: Tensor | None, parts: int, counts: Tensor) -> Tensor:
    """Divide learned images into at most `parts` parts to leave out one after another; return the part of each, (n,).

    Groups are not divided, and those of a class are spread over as many parts as possible. `counts`, (C,), are the
    numbers of learned images. If a class would lose all of its images with a part, its images there have the part -1.
    """
    order = labels.argsort(stable=True)
    found = torch.empty_like(labels)
    if groups is None:
        found[order] = torch.arange(len(order)).to(labels) % parts
        return found
    numbers, groups = groups.to(labels).unique(return_inverse=True)
    first = torch.full((len(numbers),), len(order)).to(labels)
    first = first.scatter_reduce(0, groups[order], torch.arange(len(order)).to(labels), "amin")
    place = torch.empty_like(first)
    place[first.argsort()] = torch.arange(len(first)).to(labels) % parts
    found = place[groups]
    same = counts_of(torch.stack([found, labels], dim=1))
    return torch.where(same < counts.to(labels)[labels], found, -1)
