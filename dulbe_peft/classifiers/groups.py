"""Groups of images that show the same thing: a burst, an item, a site or a day. They are left out together.

An image is left out of learning to see how a further one would be classified. If another photograph of the same item
is learned, this says nothing about a further item.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

# On 8 sets of photographs with 4 to 40 images a class, at most 13 % of the images are nearer than this to another one,
# without a false alarm in 99 draws. With one near copy of each image, it is 72 % or more.
NEAR, MANY_ALIKE = 1 / 3, 1 / 4
# Items of a class from which wrong labels can be told from items that differ more than their frames. With two to four
# items a class and nine frames of each, on five sets without wrong labels, 16 of 96 intervals excluded 0.
FEW_ITEMS = 5
ENOUGH = 20  # images from which the share is judged
MOST_COMPARED = 500  # images of a class


def check_groups(groups: object, count: int) -> Tensor | None:
    """Return the number of each image's group, (n,), from 0; None if there are no groups, or none with two images.

    Equal entries of `groups`, texts or integers, are one group.
    """
    if groups is None:
        return None
    given = groups.detach().cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    if given.shape != (count,):
        raise ValueError(f"groups must be ({count},), one per image, got shape {given.shape}")
    if given.dtype.kind not in "iuSUO":
        raise TypeError(f"groups must be integers or texts, got {given.dtype}")
    # A list of texts and nan is an array of texts only.
    each: Iterable[object] = [] if given.dtype.kind in "iu" else np.asarray(groups, dtype=object)
    if wrong := [x for x in each if not isinstance(x, (str, int, np.integer))]:
        raise TypeError(f"groups must be integers or texts, got {wrong[0]!r}: give an image without a group its own")
    names, numbers = np.unique(given.astype(str) if given.dtype.kind == "O" else given, return_inverse=True)
    return None if len(names) == count else torch.from_numpy(numbers.reshape(-1))


def rows_by_group(groups: Tensor) -> list[Tensor]:
    """Return the rows of each group."""
    order = groups.argsort(stable=True)
    return list(order.split(groups.unique(return_counts=True)[1].tolist()))


def together(labels: Tensor, groups: Tensor | None) -> Tensor:
    """Return how many images of the same class are in the group of each image, itself included, (n,)."""
    if groups is None:
        return torch.ones_like(labels)
    pairs = torch.stack([groups.to(labels), labels], dim=1)
    return counts_of(pairs)


def counts_of(pairs: Tensor) -> Tensor:
    """Return how often each row of (n, k) occurs, (n,)."""
    _, places, counts = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    return counts[places]


def places_among(labels: Tensor) -> Tensor:
    """Count, for each label, the earlier labels that are equal to it, (n,)."""
    ordered, order = labels.sort(stable=True)
    places = torch.arange(len(labels)).to(order) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, places)


def sums_of_groups(images: Tensor, labels: Tensor, groups: Tensor | None) -> Tensor:
    """Return the sum of the images of the same class and group, (n, d), for each image."""
    if groups is None:
        return images
    places = torch.stack([groups.to(labels), labels], dim=1).unique(dim=0, return_inverse=True)[1]
    sums = images.new_zeros(int(places.max()) + 1 if len(places) else 0, images.shape[1])
    return sums.index_add(0, places, images)[places]


def groups_of_classes(labels: Tensor, groups: Tensor | None, classes: int) -> Tensor:
    """Return the number of groups of each class, (C,)."""
    if groups is None:
        return labels.bincount(minlength=classes)
    return torch.stack([groups.to(labels), labels], dim=1).unique(dim=0)[:, 1].bincount(minlength=classes)


def few_items(labels: Tensor, groups: Tensor | None) -> bool:
    """Return whether learned images, (n,), have so few groups that they say nothing about wrong labels."""
    if groups is None:
        return False
    pairs = torch.stack([groups.to(labels), labels], dim=1).unique(dim=0)
    return len(pairs) < FEW_ITEMS * len(labels.unique())


def ranking(images: Tensor) -> Tensor:
    """Return the dot product of each feature with a fixed vector, (n,): a ranking that no order of images changes."""
    fixed = torch.arange(1, images.shape[1] + 1, dtype=torch.float64).sin().to(images)
    # A matrix product may round a row differently at another position; a sum over the row does not.
    return (images * fixed).sum(dim=1)


def share_alike(images: Tensor, labels: Tensor) -> float:
    """Return the share of the images, (n, d), that lie much nearer to an image of their class than these do usually.

    An image counts if its squared distance from the nearest image of its class is less than `NEAR` times the median
    squared distance in the class. For independent images in many dimensions all distances are similar. Classes with
    fewer than three images tell nothing.
    """
    near = [(away.amin(dim=1) < NEAR * away[away.isfinite()].median()) for rows, away in _distances(images, labels)]
    return float(torch.cat(near).double().mean()) if near else 0.0


def examples_alike(images: Tensor, labels: Tensor, count: int, size: int) -> list[list[int]]:
    """Return rows of images, (n, d), that look most alike: of each of `count` classes one, and those nearest to it."""
    found = []
    for rows, away in _distances(images, labels):
        nearest, first = away.amin(dim=1).min(dim=0)
        order = away[first].index_fill(0, first, -1.0).argsort(stable=True)
        found.append((float(nearest), rows[order[:size]].tolist()))
    return [rows for _, rows in sorted(found)[:count]]


def _distances(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of each class with three images or more, and the squared distances between its unit features.

    An image is infinitely far from itself.
    """
    for rows in rows_by_group(labels):
        if len(rows) > 2:
            part = torch.nn.functional.normalize(images[rows[:MOST_COMPARED]].double(), dim=1)
            away = (2 - 2 * part @ part.T).clamp_min(0).fill_diagonal_(torch.inf)
            yield rows[:MOST_COMPARED], away
