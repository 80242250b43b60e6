"""Classifiers of features and of images as scikit-learn estimators, for pipelines, cross-validation and so on."""

import copy
import warnings
from collections.abc import Hashable, Mapping
from functools import lru_cache
from numbers import Number
from typing import Any, Self

import numpy as np
import torch

from dulbe_peft.arguments import LearnerArguments, check_template
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.classifiers.rule import check_can
from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.unlabelled import as_image, unlabelled_images
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.encoders.loading import has_text, load_dual_encoder, logit_scale
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.torch_settings import default_torch_settings

with installed("an estimator"):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data

DTYPES = (np.float64, np.float32)
NUMBERS = "biuf"  # the kinds of NumPy's numeric dtypes


class FeatureClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of `CLASSIFIERS` for image features. Features are normalised, and classes can be added over time.

    Scores are float32, so the score of an image may differ in the last digit between a batch and the image alone.

    Args:
        classifier: Name and settings of the classifier, such as "lda", "bayes" or "ranpac:features=1000,seed=3".
        texts: Label -> text embedding, (d,), for every class. Classifiers that read text need it, except "bayes", for
            which it is optional.
        logit_scale: tau of the model that computed the features; 100 for CLIP.

    Attributes:
        classes_: The labels, sorted.
        classifier_: The fitted `Classifier`, whose class names are the labels as strings.
        n_features_in_: The number of features d.

    >>> X, y = np.array([[1.0, 0.1], [0.9, 0.0], [0.1, 1.0], [0.0, 0.8]]), ["ant", "ant", "bee", "bee"]
    >>> FeatureClassifier("prototype").fit(X, y).predict([[0.7, 0.2]]).tolist()
    ['ant']
    """

    classes_: np.ndarray
    classifier_: Classifier
    _labels: np.ndarray  # the labels in the order in which their classes were learned

    def __init__(
        self, classifier: str = "bayes", *, texts: Mapping[Hashable, Any] | None = None, logit_scale: float = 100.0
    ) -> None:
        self.classifier = classifier
        self.texts = texts
        self.logit_scale = logit_scale

    def fit(self, X: object, y: object, groups: object = None) -> Self:
        """Fit all classes from scratch, as one task, on features, (n, d), and labels, (n,).

        `groups`, (n,), are as in scikit-learn: rows with the same entry are left out together to calibrate.
        """
        return self._learn(X, y, None, anew=True, groups=groups)

    def partial_fit(self, X: object, y: object, classes: object = None) -> Self:
        """Continue learning: new classes as a further task, and more features of known classes.

        `classes` are labels to add to `classes_`. A label has probability 0 until features of its class are learned.
        """
        return self._learn(X, y, classes, anew=not hasattr(self, "classifier_"))

    def decision_function(self, X: object) -> np.ndarray:
        """Return the scores, (n, classes); for two classes, the second score minus the first, (n,)."""
        scores = self._columns(X, "forward", -np.inf)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict_proba(self, X: object) -> np.ndarray:
        """Return the probabilities, (n, classes), in the order of `classes_`; warn if they are not calibrated."""
        columns = self._columns(X, "probabilities", 0.0)
        if doubt := self.classifier_.doubt:
            warnings.warn(doubt, stacklevel=2)
        return columns

    def predict(self, X: object) -> np.ndarray:
        """Return the most likely label of each image, (n,)."""
        best = self._columns(X, "forward", -np.inf).argmax(axis=1)
        return self.classes_[best]

    def _learn(self, X: Any, y: Any, classes: Any, anew: bool, groups: Any = None) -> Self:
        X, y = validate_data(self, X, y, reset=anew, dtype=DTYPES, ensure_min_features=2 if anew else 1)
        check_classification_targets(y)
        if anew:
            known, model = y[:0], make_classifier(self.classifier, X.shape[1], self.logit_scale)
        else:
            known, model = self._labels, self.classifier_.fork()
        if (known.dtype.kind in NUMBERS) != (y.dtype.kind in NUMBERS):
            raise ValueError(f"y must hold labels like {known[:1].tolist()}, got {y[:1].tolist()}")
        further = [] if classes is None else list(classes)
        for label in further:  # NumPy would convert numbers to strings
            if isinstance(label, (Number, np.bool_)) != (y.dtype.kind in NUMBERS):
                raise ValueError(f"classes must hold labels like those of y, {y[:1].tolist()}, got {label!r}")
        old = np.isin(y, known)
        new = np.unique(y[~old])
        if old.any():
            check_can(model.rule, "update")
        seen = np.concatenate([known, new])
        place = {label: index for index, label in enumerate(seen.tolist())}
        labels = np.array([place[label] for label in y.tolist()])
        if len(new):
            texts = self._texts(seen.tolist()) if model.needs_text or (model.reads_text and self.texts) else None
            model.add_classes(
                [str(label) for label in new.tolist()], X[~old], labels[~old] - len(known), texts, groups=groups
            )
        if old.any():
            model.update_classes(X[old], labels[old])
        declared = [] if anew else [self.classes_]
        self.classes_ = np.unique(np.concatenate([*declared, seen, further if further else seen[:0]]))
        self._labels, self.classifier_ = seen, model
        return self

    def _texts(self, labels: list[object]) -> np.ndarray:
        missing = [label for label in labels if label not in (self.texts or {})]
        if self.texts is None or missing:
            raise ValueError(f"{self.classifier!r} needs texts, but texts has none for the class {missing[0]!r}")
        return np.stack([np.asarray(self.texts[label], dtype=np.float32) for label in labels])

    @torch.no_grad()
    def _columns(self, X: Any, answer: str, absent: float) -> np.ndarray:
        """Call the classifier's method `answer`. Columns follow `classes_`; classes without features get `absent`."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=DTYPES)
        learned = getattr(self.classifier_, answer)(X).double().cpu().numpy()
        columns = np.full((len(X), len(self.classes_)), absent)
        columns[:, np.searchsorted(self.classes_, self._labels)] = learned
        return columns


class ImageClassifier(ClassifierMixin, BaseEstimator):
    """A classifier for images: a pretrained model computes features, and a classifier learns from them.

    The estimator can be cloned, pickled, cross-validated and grid-searched. The model itself is not trained. The
    features of each image are kept in the feature store, so that it is encoded only once. The model is loaded once per
    process.

    Images are a list or an array of paths, PIL images, or (height, width, 3) arrays of bytes.

    Args:
        model: The model, as `load_dual_encoder` takes it: a folder, a repository id on the Hub, or "demo".
        classifier: Name and settings of the classifier, as for [`FeatureClassifier`].
        prompt_template: The prompt for a label, which replaces `{}`. It is used if the model has a text tower.

    Attributes:
        classes_: The labels, sorted.
        features_: The fitted [`FeatureClassifier`].
        encoder_: Facts about the model, processor and precision that computed the features. Predicting with others is
            an error.

    >>> from sklearn.datasets import load_digits
    >>> digits, names = load_digits(), np.array(["zero", "one", "two", "three"])
    >>> X, y = digits.images[digits.target < 4] * 15.9, names[digits.target[digits.target < 4]]
    >>> classifier = ImageClassifier("demo").fit(X[:100].astype(np.uint8), y[:100])
    >>> bool(classifier.score(X[100:200].astype(np.uint8), y[100:200]) > 0.9)
    True
    """

    classes_: np.ndarray
    features_: FeatureClassifier
    encoder_: dict[str, str]

    def __init__(self, model: str, classifier: str = "bayes", *, prompt_template: str = "a photo of a {}.") -> None:
        self.model = model
        self.classifier = classifier
        self.prompt_template = prompt_template

    @default_torch_settings()
    def fit(self, images: object, y: object, groups: object = None) -> Self:
        """Fit all classes from scratch, as one task, on n images and labels, (n,). A label's text is its name.

        `groups`, (n,), are as for [`FeatureClassifier`].
        """
        encoder = _encoder(str(self.model))
        classifier = FeatureClassifier(self.classifier, texts=self._texts(y), logit_scale=logit_scale(encoder.clip))
        self.features_ = classifier.fit(self._embeds(images, anew=True), y, groups)
        self.classes_, self.encoder_ = self.features_.classes_, encoder.facts  # together: an error changes nothing
        return self

    @default_torch_settings()
    def partial_fit(self, images: object, y: object, classes: object = None) -> Self:
        """Continue learning, as `FeatureClassifier.partial_fit`: new classes, and more images of known classes.

        After an error, the estimator is as it was before.
        """
        encoder, anew = _encoder(str(self.model)), not hasattr(self, "features_")
        if anew:
            features = FeatureClassifier(self.classifier, texts={}, logit_scale=logit_scale(encoder.clip))
        else:
            features = copy.copy(self.features_)  # its classifier is replaced, not changed
        texts = self._texts(y)
        features.texts = None if texts is None else {**texts, **(features.texts or {})}
        self.features_ = features.partial_fit(self._embeds(images, anew), y, classes)
        self.classes_, self.encoder_ = self.features_.classes_, encoder.facts
        return self

    def _texts(self, y: object) -> dict[Hashable, object] | None:
        """Return the text embedding of each label, or None if the model has no text tower."""
        encoder = _encoder(str(self.model))
        if not has_text(encoder.clip):
            return None
        labels = np.unique(np.asarray(y)).tolist()
        names = check_class_names([str(label) for label in labels])
        check_template("prompt_template", self.prompt_template)
        prompts = {name: [self.prompt_template.replace("{}", name)] for name in names}
        return dict(zip(labels, encoder.text_embeds(names, prompts).cpu().numpy(), strict=True))

    def predict(self, images: object) -> np.ndarray:
        """Return the most likely label of each image, (n,)."""
        check_is_fitted(self)
        return self.features_.predict(self._embeds(images))

    def predict_proba(self, images: object) -> np.ndarray:
        """Return the probabilities, (n, classes), in the order of `classes_`; warn if they are not calibrated."""
        check_is_fitted(self)
        return self.features_.predict_proba(self._embeds(images))

    @default_torch_settings()
    def _embeds(self, images: Any, anew: bool = False) -> np.ndarray:
        encoder = _encoder(str(self.model))
        facts = encoder.facts
        if differ := sorted(name for name in facts if not anew and facts[name] != self.encoder_.get(name)):
            raise ValueError(
                f"the encoder {self.model!r} has changed since this classifier was fitted: {differ} differ; fit again"
            )
        data = unlabelled_images([as_image(number, image) for number, image in enumerate(images)])
        return encoder.dataset_embeds(encoder.images(data)).cpu().numpy()


@lru_cache(maxsize=2)
def _encoder(model: str) -> Encoder:
    """Load a model with its feature store, once per process."""
    return Encoder.at_rest(*load_dual_encoder(model), LearnerArguments(progress=False))
