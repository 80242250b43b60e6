"""Find images whose label is probably wrong, because a classifier that has not seen them predicts another class."""

import warnings
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from dulbe_peft.classifiers.calibration import FOLDS
from dulbe_peft.sklearn import FeatureClassifier

SWAPPED = 0.05  # share of the labels that one trial swaps
TRIALS, ENOUGH = 5, 60  # at most 5 trials, fewer if 60 labels have been swapped before


class Trial(NamedTuple):
    """Counts over all trials: swapped labels that were found, swapped labels, other labels doubted, other labels."""

    found: int
    swapped: int
    others_doubted: int
    others: int


def try_swapped_labels(
    features: np.ndarray, labels: np.ndarray, texts: np.ndarray | None, logit_scale: float
) -> Trial | None:
    """Swap some labels between classes on a copy, and count how many of the swapped labels `doubtful_labels` finds.

    The arguments are those of `doubtful_labels`. Classes keep their sizes. Return None if fewer than two classes have
    two images or more.
    """
    judged = np.flatnonzero(np.bincount(labels)[labels] > 1)
    pairs = min(max(1, round(SWAPPED * len(judged) / 2)), ENOUGH // 2)
    generator, trial = np.random.default_rng(0), Trial(0, 0, 0, 0)
    for _ in range(TRIALS):
        changed = _swapped(labels, generator.permutation(judged), pairs)
        places = {*np.flatnonzero(changed != labels).tolist()}
        if not places:
            return None
        doubted = {image for image, _, _ in doubtful_labels(features, changed, texts, logit_scale)}
        counts = len(doubted & places), len(places), len(doubted - places), len(judged) - len(places)
        trial = Trial(*(before + now for before, now in zip(trial, counts, strict=True)))
        if trial.swapped >= ENOUGH:
            break
    return trial


def _swapped(labels: np.ndarray, order: np.ndarray, pairs: int) -> np.ndarray:
    """Return a copy of the labels in which at most `pairs` pairs of images, drawn in this order, swap their labels."""
    changed, left = labels.copy(), order.tolist()
    while pairs and left:
        first = left.pop()
        second = next((image for image in reversed(left) if labels[image] != labels[first]), None)
        if second is None:
            break
        left.remove(second)
        changed[[first, second]] = labels[[second, first]]
        pairs -= 1
    return changed


def doubtful_labels(
    features: np.ndarray, labels: np.ndarray, texts: np.ndarray | None, logit_scale: float
) -> list[tuple[int, int, float]]:
    """Return (image, predicted class, probability of its label) for doubtful images, least probable label first.

    `bayes` predicts each fifth of the images after it has learned the others. An image that is alone in its class is
    left out, because no other image shows that class.

    Args:
        features: Features of the images, (n, d).
        labels: Class indices, (n,).
        texts: Text features of the classes, (classes, d), or None.
        logit_scale: The scale of the model's cosines.
    """
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    counts = np.bincount(labels)
    rows = np.flatnonzero(counts[labels] > 1)
    if (counts > 1).sum() < 2:
        return []
    classes, targets = np.unique(labels[rows], return_inverse=True)
    class_texts: dict[Hashable, np.ndarray] = {} if texts is None else dict(enumerate(texts[classes]))
    classifier = FeatureClassifier("bayes", texts=class_texts, logit_scale=logit_scale)
    folds = StratifiedKFold(min(FOLDS, counts.max()), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        # A class with fewer images than folds is missing from some test folds, which does no harm here.
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        # The folds may leave one image of each class. The share of doubts that are right is measured separately.
        warnings.filterwarnings("ignore", "no image could be left out", UserWarning)
        probabilities = cross_val_predict(classifier, features[rows], targets, cv=folds, method="predict_proba")
    predicted = probabilities.argmax(axis=1)
    doubtful = np.flatnonzero(predicted != targets)
    columns = rows[doubtful], classes[predicted[doubtful]], probabilities[doubtful, targets[doubtful]]
    doubts = zip(*(column.tolist() for column in columns), strict=True)
    return sorted(doubts, key=lambda doubt: (doubt[2], doubt[0]))
