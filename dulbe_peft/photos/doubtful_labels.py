"""Find images whose label is probably wrong, because a classifier that has not seen them predicts another class.

With groups, all photographs of a group with the same label are an item. An item is judged by the mean of their
log-probabilities, because its photographs have one label and are wrong together.
"""

import warnings
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import torch

from dulbe_peft.classifiers import confusion
from dulbe_peft.classifiers.bayes import BayesClassifier
from dulbe_peft.classifiers.groups import few_items
from dulbe_peft.classifiers.leaving import FOLDS, in_parts
from dulbe_peft.sklearn import FeatureClassifier

SWAPPED = 0.05  # share of the labels that one trial swaps
TRIALS, ENOUGH = 5, 60  # at most 5 trials, fewer if 60 labels have been swapped before


class Doubt(NamedTuple):
    """An image or item whose label is doubtful, its predicted class, and the probabilities of label and this class.

    `image` is the first of `images`, the photographs of the item, of which `alike` look like the predicted class.
    `wrong` is the probability that the label is wrong, for the share of wrong labels and the ends of its interval, see
    `classifiers.confusion`.
    """

    image: int
    predicted: int
    own: float
    probability: float
    images: tuple[int, ...]
    alike: int
    wrong: tuple[float, float, float]


class Doubts(NamedTuple):
    """The doubtful labels, and the share of wrong labels with the ends of its 95 % interval, from 0 to 1.

    The share is None if too few images or items could be left out to tell wrong labels.
    """

    labels: list[Doubt]
    share: tuple[float, float, float] | None


class Trial(NamedTuple):
    """Counts over all trials: swapped labels that were found, swapped labels, other labels doubted, other labels.

    With groups, these are labels of items.
    """

    found: int
    swapped: int
    others_doubted: int
    others: int


def items_of(labels: np.ndarray, groups: np.ndarray | None = None) -> list[tuple[int, ...]]:
    """Return the images of each item, in a class with two items or more: those with the same label and group."""
    keys = np.arange(len(labels)) if groups is None else groups
    pairs = np.stack([np.unique(keys, return_inverse=True)[1].reshape(-1), labels], axis=1)
    _, places, sizes = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(places.reshape(-1), kind="stable"), np.cumsum(sizes)[:-1])
    several = np.bincount([labels[of[0]] for of in rows], minlength=labels.max() + 1) > 1
    return [tuple(of.tolist()) for of in rows if several[labels[of[0]]]]


def try_swapped_labels(
    features: np.ndarray,
    labels: np.ndarray,
    texts: np.ndarray | None,
    logit_scale: float,
    groups: np.ndarray | None = None,
) -> Trial | None:
    """Swap some labels between classes on a copy, and count how many of the swapped labels `doubtful_labels` finds.

    The arguments are those of `doubtful_labels`. With groups, whole items are swapped. Classes keep their numbers of
    items. Return None if fewer than two classes have two items or more.
    """
    items = items_of(labels, groups)
    owners = np.array([labels[of[0]] for of in items], dtype=np.int64)
    # An item must not meet photographs of its group that have the label already.
    has = set() if groups is None else {*zip(groups.tolist(), labels.tolist(), strict=True)}
    inside = np.array(
        [groups is None or sum((groups[of[0]], c) in has for c in np.unique(labels)) == 1 for of in items]
    )
    judged = np.flatnonzero(inside)
    pairs = min(max(1, round(SWAPPED * len(judged) / 2)), ENOUGH // 2)
    generator, trial = np.random.default_rng(0), Trial(0, 0, 0, 0)
    for _ in range(TRIALS):
        given = _swapped(owners, generator.permutation(judged), pairs)
        places = {items[at] for at in np.flatnonzero(given != owners)}
        if not places:
            return None
        changed = labels.copy()
        for of, label in zip(items, given, strict=True):
            changed[list(of)] = label
        doubted = {doubt.images for doubt in doubtful_labels(features, changed, texts, logit_scale, groups).labels}
        others = {*items} - places
        counts = len(doubted & places), len(places), len(doubted & others), len(others)
        trial = Trial(*(before + now for before, now in zip(trial, counts, strict=True)))
        if trial.swapped >= ENOUGH:
            break
    return trial


def _swapped(labels: np.ndarray, order: np.ndarray, pairs: int) -> np.ndarray:
    """Return a copy of the labels in which at most `pairs` pairs of items, drawn in this order, swap their labels."""
    changed, left = labels.copy(), order.tolist()
    while pairs and left:
        first = left.pop()
        second = next((item for item in reversed(left) if labels[item] != labels[first]), None)
        if second is None:
            break
        left.remove(second)
        changed[[first, second]] = labels[[second, first]]
        pairs -= 1
    return changed


def doubtful_labels(
    features: np.ndarray,
    labels: np.ndarray,
    texts: np.ndarray | None,
    logit_scale: float,
    groups: np.ndarray | None = None,
) -> Doubts:
    """Return the doubtful items, the least probable label first, and then doubtful images of other items.

    `bayes` predicts each fifth of the images after it has learned the others. An image or item that is alone in its
    class is left out, because no other one shows that class. `classifiers.confusion` tells which labels are wrong.

    Args:
        features: Features of the images, (n, d).
        labels: Class indices, (n,).
        texts: Text features of the classes, (classes, d), or None.
        logit_scale: The scale of the model's cosines.
        groups: The number of each image's group, (n,), or None: each image is an item. Images of a group are left
            out together.
    """
    rows, classes, targets = _judged(labels)
    if len(classes) < 2:
        return Doubts([], None)
    classifier = _classifier(classes, texts, logit_scale)
    if groups is None:
        probabilities = _left_out(classifier, features[rows], targets)
    else:
        left, probabilities = _groups_left_out(classifier, features[rows], targets, groups[rows])
        rows, targets = rows[left], targets[left]
    place = {image: at for at, image in enumerate(rows.tolist())}
    logs = np.log(np.maximum(probabilities, 1e-300))

    def judged(items: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
        """Return the items that were left out, their probabilities, (items, classes), and their labels' places."""
        of = [item for item in items if any(image in place for image in item)]
        at = [[place[image] for image in item if image in place] for item in of]
        means = np.array([logs[rows].mean(axis=0) for rows in at]).reshape(-1, len(classes))
        means = np.exp(means - np.logaddexp.reduce(means, axis=1, keepdims=True))
        return of, means, np.array([targets[rows[0]] for rows in at], dtype=np.int64)

    def doubts(items: list[tuple[int, ...]], found: np.ndarray, own: np.ndarray) -> list[Doubt]:
        wrong, made = told.of(torch.from_numpy(found), torch.from_numpy(own)).tolist(), []
        for item, each, label, error in zip(items, found, own, wrong, strict=True):
            if (best := int(each.argmax())) != label:
                alike = sum(int(logs[place[image]].argmax()) == best for image in item if image in place)
                images = item[0], int(classes[best]), float(each[label]), float(each[best]), item, alike
                made.append(Doubt(*images, (error[0], error[1], error[2])))
        return sorted(made, key=lambda doubt: (doubt.own, doubt.image))

    of, found, own = judged(items_of(labels, groups))
    if not of:
        return Doubts([], None)
    told = confusion.wrong_labels(torch.from_numpy(found), torch.from_numpy(own))
    here = doubts(of, found, own)
    inside = {image for doubt in here for image in doubt.images}
    further = doubts(*judged([(image,) for item in of if len(item) > 1 for image in item if image not in inside]))
    few = groups is not None and few_items(torch.from_numpy(targets), torch.from_numpy(groups[rows]))
    return Doubts([*here, *further], None if few else told.shares)


def _left_out(classifier: FeatureClassifier, features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the probabilities of images, (n, classes), from a classifier that has not learned their fifth."""
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    folds = StratifiedKFold(min(FOLDS, np.bincount(targets).max()), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        # A class with fewer images than folds is missing from some test folds, which does no harm here.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        # The folds may leave one image of each class. The share of doubts that are right is measured separately.
        warnings.filterwarnings("ignore", "no image could be left out", UserWarning)
        found: np.ndarray = cross_val_predict(classifier, features, targets, cv=folds, method="predict_proba")
    return found


def _groups_left_out(
    classifier: FeatureClassifier, features: np.ndarray, targets: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return as `_left_out`, but leave groups out as a whole; and the images of classes that keep other images."""
    counts = torch.from_numpy(np.bincount(targets))
    parts = in_parts(torch.from_numpy(targets), torch.from_numpy(groups), FOLDS, counts).numpy()
    left = np.flatnonzero(parts >= 0)
    found = np.zeros((len(targets), len(counts)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no image could be left out", UserWarning)
        for part in np.unique(parts[left]):
            # Images of the part in a class that would lose all of its images are learned.
            learned = parts != part
            classifier.fit(features[learned], targets[learned], groups[learned])
            found[parts == part] = classifier.predict_proba(features[parts == part])
    return left, found[left]


def misnamed_classes(
    features: np.ndarray,
    labels: np.ndarray,
    texts: np.ndarray | None,
    logit_scale: float,
    groups: np.ndarray | None = None,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the `misnamed` and the `exchanged` classes of a `bayes` that has learned all images.

    The arguments are those of `doubtful_labels`. An image that is alone in its class is left out.
    """
    rows, classes, targets = _judged(labels)
    if len(classes) < 2 or texts is None:
        return [], []
    together = None if groups is None else groups[rows]
    learned = _classifier(classes, texts, logit_scale).fit(features[rows], targets, together).classifier_
    assert isinstance(learned, BayesClassifier)
    of = {name: int(classes[int(name)]) for name in learned.misnamed}
    return [*of.values()], [(of[one], of[other]) for one, other in learned.exchanged]


def _judged(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the images of classes with two images or more, these classes, and the images' places among them."""
    rows = np.flatnonzero(np.bincount(labels)[labels] > 1)
    classes, targets = np.unique(labels[rows], return_inverse=True)
    return rows, classes, targets


def _classifier(classes: np.ndarray, texts: np.ndarray | None, logit_scale: float) -> FeatureClassifier:
    class_texts: dict[Hashable, np.ndarray] = {} if texts is None else dict(enumerate(texts[classes]))
    return FeatureClassifier("bayes", texts=class_texts, logit_scale=logit_scale)
