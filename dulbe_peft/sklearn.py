"""A classifier over features as a scikit-learn estimator, for pipelines, cross-validation and what else takes one."""

from collections.abc import Hashable, Mapping
from numbers import Number
from typing import Any, Self

import numpy as np
import torch

from dulbe_peft.classifiers import Classifier, make_classifier
from dulbe_peft.utils.extras import installed

with installed("an estimator"):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

DTYPES = (np.float64, np.float32)
NUMBERS = "biuf"  # kinds of NumPy's types


class FeatureClassifier(ClassifierMixin, BaseEstimator):
    """Any classifier of `CLASSIFIERS` over image features: it normalises them, and learns class by class.

    Scores are float32, so those of an image alone and in a batch may differ in the last digit.

    Args:
        classifier: its name and settings, such as "lda", "bayes" or "ranpac:features=1000,seed=3".
        texts: label -> embedding of its text, (d,), of every class, for classifiers that read texts; `bayes` can do
            without.
        logit_scale: tau of the model that made the features; 100 for CLIP.

    Attributes:
        classes_: the labels, sorted.
        classifier_: the `Classifier` that has learned; its class names are the labels as strings.
        n_features_in_: d.

    >>> X, y = np.array([[1.0, 0.1], [0.9, 0.0], [0.1, 1.0], [0.0, 0.8]]), ["ant", "ant", "bee", "bee"]
    >>> FeatureClassifier("prototype").fit(X, y).predict([[0.7, 0.2]]).tolist()
    ['ant']
    """

    classes_: np.ndarray
    classifier_: Classifier
    _labels: np.ndarray  # in the order in which the classes came

    def __init__(
        self,
        classifier: str = "lda",
        *,
        texts: Mapping[Hashable, Any] | None = None,
        logit_scale: float = 100.0,
    ) -> None:
        self.classifier = classifier
        self.texts = texts
        self.logit_scale = logit_scale

    def fit(self, X: Any, y: Any) -> Self:
        """Learn all classes anew, as one task, from features, (n, d), and labels, (n,)."""
        return self._learn(X, y, None, anew=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> Self:
        """Learn on: images of new classes as a further task, and further images of known ones.

        `classes` are labels that are in `classes_` from now on; until images of them come they have probability 0.
        """
        return self._learn(X, y, classes, anew=not hasattr(self, "classifier_"))

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores, (n, classes); of two classes, (n,), how far the second one is ahead."""
        scores = self._columns(X, "forward", -np.inf)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Calibrated probabilities, (n, classes), in the order of `classes_`."""
        return self._columns(X, "probabilities", 0.0)

    def predict(self, X: Any) -> np.ndarray:
        """The most likely label of each image, (n,)."""
        best = self._columns(X, "forward", -np.inf).argmax(axis=1)
        return self.classes_[best]

    def _learn(self, X: Any, y: Any, classes: Any, anew: bool) -> Self:
        X, y = validate_data(self, X, y, reset=anew, dtype=DTYPES, ensure_min_features=2 if anew else 1)
        check_classification_targets(y)
        if anew:
            known, model = y[:0], make_classifier(self.classifier, X.shape[1], self.logit_scale)
        else:
            known, model = self._labels, self.classifier_.fork()
        if (known.dtype.kind in NUMBERS) != (y.dtype.kind in NUMBERS):
            raise ValueError(f"y must hold labels like {known[:1].tolist()}, got {y[:1].tolist()}")
        further = [] if classes is None else list(classes)
        for label in further:  # NumPy would make texts of numbers
            if isinstance(label, (Number, np.bool_)) != (y.dtype.kind in NUMBERS):
                raise ValueError(f"classes must hold labels like {y[:1].tolist()}, those of y, got {label!r}")
        old = np.isin(y, known)
        new = np.unique(y[~old])
        if old.any():
            model.check_update()
        seen = np.concatenate([known, new])
        place = {label: index for index, label in enumerate(seen.tolist())}
        if len(new):
            labels = [place[label] - len(known) for label in y[~old].tolist()]
            texts = self._texts(seen.tolist()) if model.needs_text or (model.reads_text and self.texts) else None
            model.add_classes([str(label) for label in new.tolist()], X[~old], labels, texts)
        if old.any():
            model.update_classes(X[old], [place[label] for label in y[old].tolist()])
        declared = [] if anew else [self.classes_]
        self.classes_ = np.unique(np.concatenate([*declared, seen, further if further else seen[:0]]))
        self._labels, self.classifier_ = seen, model
        return self

    def _texts(self, labels: list[Any]) -> np.ndarray:
        missing = [label for label in labels if label not in (self.texts or {})]
        if self.texts is None or missing:
            raise ValueError(f"{self.classifier!r} needs texts, and texts has none of class {missing[0]!r}")
        return np.stack([np.asarray(self.texts[label], dtype=np.float32) for label in labels])

    @torch.no_grad()
    def _columns(self, X: Any, answer: str, absent: float) -> np.ndarray:
        """What the classifier answers, in the order of `classes_`; `absent` for a class without an image."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=DTYPES)
        found = getattr(self.classifier_, answer)(X).double().cpu().numpy()
        columns = np.full((len(X), len(self.classes_)), absent)
        columns[:, np.searchsorted(self.classes_, self._labels)] = found
        return columns
