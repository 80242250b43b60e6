"""Which learned images are left out, to see how further images would be classified. They are chosen here alone.

choose         evenly by rank, or whole groups: the temperature of `lda`, `gda` and `pooled_bridge`, and novelty
in_turn        one image of each class after another: the settings and the temperature of `bayes`
held_out       of each class one image of five, which a copy does not learn: rules without a closed form
by_content     the same number of images of each class in the feature store: estimates
in_parts       parts of the chosen images that are left out together, where each part costs a decomposition
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dulbe_peft.classifiers.groups import counts_of, ranking, together

MOST = 1000  # images of a task, or of the store, that are left out
MOST_SCORES = 2**24  # scores that a temperature is fitted to; of more held-out images, an even selection is used


@dataclass(frozen=True, eq=False)
class Left:
    """Images that are left out, whole groups at a time.

    Attributes:
        rows: Their rows among the given images, (m,).
        labels: Their classes, (m,).
        groups: Their groups, (m,), or None if each image is a group.
        scores: (m, C), by a classifier that had not learned them, once they are known.
        closed: Whether `scores` are exactly those of `Rule.left_out`, which then need not be repeated.
    """

    rows: Tensor
    labels: Tensor
    groups: Tensor | None
    scores: Tensor | None = None
    closed: bool = False

    @classmethod
    def of(cls, rows: Tensor, labels: Tensor, groups: Tensor | None) -> "Left":
        """Leave out some rows of images with labels, (n,), and groups, (n,)."""
        return cls(rows, labels[rows], None if groups is None else groups[rows])


def choose(images: Tensor, labels: Tensor, groups: Tensor | None, counts: Tensor) -> Left:
    """Choose about `MOST` images of whole groups, evenly, whose class has images outside of their group.

    `counts`, (C,), are the numbers of learned images. The result is on the device of the images, (n, d).
    """
    labels = labels.to(images.device)
    groups = None if groups is None else groups.to(labels)
    rows = (counts.to(labels)[labels] > together(labels, groups)).nonzero()[:, 0]
    step = max(1, -(-len(rows) // MOST))
    if groups is None:
        return Left.of(rows[ranking(images[rows]).argsort()][::step], labels, None)
    return Left.of(rows[torch.isin(groups[rows], groups[rows].unique()[::step])], labels, groups)


def in_turn(places: Tensor, most: int) -> Tensor:
    """Return the rows of at most `most` images, one of each class after another.

    `places`, (n,), count the images of the same class that come before each image.
    """
    return places.argsort(stable=True)[:most]


def held_out(images: Tensor, labels: Tensor, groups: Tensor | None, classes: int) -> tuple[Tensor, Left]:
    """Return which images a copy does not learn, (n,) in bool, and those of them that are scored for `classes`."""
    from dulbe_peft.classifiers.calibration import hold_back

    held = hold_back(images, labels, groups)
    rows = held.nonzero()[:, 0]
    if (step := len(rows) * classes // MOST_SCORES + 1) > 1:
        rows = rows[ranking(images[rows]).argsort()][::step]
    return held, Left.of(rows, labels, groups)


def by_content(learned: Mapping[str, Sequence[bytes]], group_of: Mapping[bytes, int]) -> dict[bytes, str]:
    """Choose about `MOST` learned images, the same number of each class that has several; return their classes.

    `learned` are the contents of each class's images. Images that were learned twice are not chosen. All images of a
    group are left out together, so all of a chosen image's group are returned.
    """
    times = Counter(chain.from_iterable(learned.values()))
    share, owner, chosen = max(1, MOST // max(1, len(learned))), dict[bytes, str](), set[int]()
    for name, contents in learned.items():
        once = sorted(content for content in contents if times[content] == 1)
        chosen |= {group_of[content] for content in once[:share] if content in group_of}
        once = [content for number, content in enumerate(once) if number < share or group_of.get(content) in chosen]
        owner |= dict.fromkeys(once if len(contents) > 1 else (), name)
    return owner


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
