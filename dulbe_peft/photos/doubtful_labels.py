"""Find images whose label is probably wrong, because a classifier that has not seen them predicts another class."""

import warnings
from collections.abc import Hashable

import numpy as np

from dulbe_peft.classifiers.calibration import FOLDS
from dulbe_peft.sklearn import FeatureClassifier


def doubtful_labels(
    features: np.ndarray, labels: np.ndarray, texts: np.ndarray | None, logit_scale: float
) -> list[tuple[int, int, float]]:
    """Return (image, predicted class, probability of its label) for doubtful images, least probable label first.

    `bayes` predicts each fifth of the images after it has learned the others. An image that is alone in its class is
    left out, because no other image shows that class.

    Args:
        features: features of the images, (n, d).
        labels: class indices, (n,).
        texts: text features of the classes, (classes, d), or None.
        logit_scale: the scale of the model's cosines.
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
        probabilities = cross_val_predict(classifier, features[rows], targets, cv=folds, method="predict_proba")
    predicted = probabilities.argmax(axis=1)
    doubtful = np.flatnonzero(predicted != targets)
    columns = rows[doubtful], classes[predicted[doubtful]], probabilities[doubtful, targets[doubtful]]
    doubts = zip(*(column.tolist() for column in columns), strict=True)
    return sorted(doubts, key=lambda doubt: (doubt[2], doubt[0]))
