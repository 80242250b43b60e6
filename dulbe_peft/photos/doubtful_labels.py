"""Images whose label is likely wrong: a classifier that has not seen them takes them for another class."""

import warnings
from collections.abc import Hashable

import numpy as np

from dulbe_peft.classifiers.calibration import FOLDS
from dulbe_peft.sklearn import FeatureClassifier


def doubtful_labels(
    features: np.ndarray, labels: np.ndarray, texts: np.ndarray | None, logit_scale: float
) -> list[tuple[int, int, float]]:
    """(image, the class that it is taken for, probability of its label), the least probable label first.

    `features` are (n, d), `texts` (classes, d). `bayes` judges each fifth of the images after
    it has learned the others. An image that is alone in its class is not judged: nothing else shows the class.
    """
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    counts = np.bincount(labels)
    places = np.flatnonzero(counts[labels] > 1)
    if (counts > 1).sum() < 2:
        return []
    classes, own = np.unique(labels[places], return_inverse=True)
    given: dict[Hashable, np.ndarray] = {} if texts is None else dict(enumerate(texts[classes]))
    made = FeatureClassifier("bayes", texts=given, logit_scale=logit_scale)
    folds = StratifiedKFold(min(FOLDS, counts.max()), shuffle=True, random_state=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)  # it is in most folds all the same
        probabilities = cross_val_predict(made, features[places], own, cv=folds, method="predict_proba")
    best = probabilities.argmax(axis=1)
    doubted = np.flatnonzero(best != own)
    columns = places[doubted], classes[best[doubted]], probabilities[doubted, own[doubted]]
    found = zip(*(column.tolist() for column in columns), strict=True)
    return sorted(found, key=lambda row: (row[2], row[0]))
