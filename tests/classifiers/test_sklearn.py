"""The estimator passes scikit-learn's checks, and learns the same as the classifier."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

from dulbe_peft.classifiers import make_classifier
from dulbe_peft.sklearn import FeatureClassifier, ImageClassifier

FAILING = {
    "check_estimators_dtypes": "a feature of zeros has no direction and is refused",
    "check_methods_subset_invariance": "some processors round a single image differently from a batch",
    "check_methods_sample_order_invariance": "some processors round the last rows of a batch differently",
}


@parametrize_with_checks([FeatureClassifier("lda")], expected_failed_checks=lambda made: FAILING)
def test_estimator_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    words = np.array(["nought", "ace", "deuce", "trey", "four", "five", "six", "seven", "eight", "nine"])
    return data.data[:600], data.target[:600], words[data.target[:600]]


def texts(X, y):
    return {label: X[y == label][:3].mean(axis=0) for label in np.unique(y).tolist()}


@pytest.mark.plain("lda", "bayes:features=0")
@pytest.mark.parametrize("spec", ["lda", "bayes:features=0", "gda:alpha=0.5", "text"])
def test_estimator_equals_the_classifier_for_labels_of_any_type(digits, spec):
    X, numbers, words = (each[:300] for each in digits)
    classifier = make_classifier(spec, 64, 50.0)
    text = torch.tensor(np.stack([texts(X, numbers)[c] for c in range(10)])).float()
    classifier.add_classes([str(c) for c in range(10)], torch.tensor(X).float(), numbers, text)
    expected = classifier.probabilities(torch.tensor(X).float()).numpy()
    for y in (numbers, words, words.astype(object), numbers.astype(float)):
        made = clone(FeatureClassifier(spec, texts=texts(X, y), logit_scale=50.0)).fit(X, y)
        order = [made.classes_.tolist().index(label) for label in [y[numbers == c][0] for c in range(10)]]
        # The classes come in another order, which rounds differently.
        np.testing.assert_allclose(made.predict_proba(X)[:, order], expected, rtol=0, atol=1e-4)
        assert made.predict(X).dtype == made.classes_.dtype and made.score(X, y) > (0.5 if spec == "text" else 0.9)


def test_partial_fit_learns_new_classes_later(digits):
    X, y, _ = digits
    made = FeatureClassifier("lda").partial_fit(X[y < 2], y[y < 2], classes=[0, 1, 7])
    assert made.classes_.tolist() == [0, 1, 7] and (made.predict_proba(X)[:, 2] == 0).all()
    assert set(made.predict(X)) == {0, 1} and made.decision_function(X).shape == (600, 3)
    half = np.arange(600) % 2 == 0
    for rows in ((y >= 3) & half, (y >= 1) & (y < 5) & half, (y >= 2) & ~half):  # 2 comes last
        made.partial_fit(X[rows], y[rows])
    assert made.classes_.tolist() == list(range(10)) and made.classifier_.class_names[2:] == [*"3456789", "2"]
    counts = dict(zip(made.classifier_.class_names, made.classifier_.counts.tolist(), strict=True))
    assert counts["0"] == (y == 0).sum() and counts["1"] == (y == 1).sum() + ((y == 1) & half).sum()
    assert counts["9"] == (y == 9).sum() and counts["4"] == (y == 4).sum() + ((y == 4) & half).sum()
    assert made.score(X, y) > 0.9


def test_probabilities_from_one_image_a_class_come_with_a_warning(digits):
    X, y, _ = digits
    first = np.unique(y, return_index=True)[1]
    made = FeatureClassifier("lda").fit(X[first], y[first])
    with pytest.warns(UserWarning, match="no image could be left out.*'lda'.*can be far off"):
        made.predict_proba(X)


def test_what_does_not_fit_is_refused_and_changes_nothing(digits):
    X, y, _ = digits
    for spec, labels, message in (
        ("lda", ["a", "b"], r"y must hold labels like \[0\], got \['a'\]"),
        ("gda", [3, 9], "'gda' needs texts, but texts has none for the class 9"),
        ("rapf", [1, 9], "'rapf' classifier cannot learn more images of a known class"),
        ("lda", [0, 1, 2], "inconsistent numbers of samples"),
    ):
        text = {c: row for c, row in texts(X, y).items() if c != 9 or "rapf" in spec}
        made = FeatureClassifier(spec, texts=text).fit(X[y < 9], y[y < 9])
        before = made.predict_proba(X)
        with pytest.raises(ValueError, match=message):
            made.partial_fit(X[:2], labels)
        np.testing.assert_array_equal(made.predict_proba(X), before)
    for labels, classes, got in ((y, ["a", "b"], "'a'"), (y, [0, 1, "2"], "'2'"), (y.astype(str), [0, 1], "0")):
        with pytest.raises(ValueError, match=rf"classes must hold labels like those of y, \[.*\], got {got}"):
            FeatureClassifier("lda").partial_fit(X, labels, classes=classes)
    named = FeatureClassifier("lda").partial_fit(X, y.astype(str), classes=np.array(["a"], dtype=object))
    assert named.classes_.tolist() == [*map(str, range(10)), "a"]
    with pytest.raises(ValueError, match="'lad'; did you mean"):
        FeatureClassifier("lad").fit(X, y)


@pytest.mark.parametrize("template", ["a photo", "{name}", "{} {}", None])
def test_prompt_template_without_one_place_for_the_name_is_refused(template):
    images = [np.zeros((8, 8, 3), np.uint8)] * 2
    with pytest.raises(ValueError, match="prompt_template must be a text with exactly one {}"):
        ImageClassifier("demo", prompt_template=template).fit(images, ["one", "two"])


def test_image_classifier_continues_with_new_classes_and_further_images(digits):
    X, y = digits_as_images()
    whole = ImageClassifier("demo", "lda").fit(X, y)
    part = ImageClassifier("demo", "lda")
    first = y != "two"
    part.partial_fit(X[first], y[first], classes=["two"])
    assert part.classes_.tolist() == sorted(set(y.tolist()))
    before = part.predict_proba(X)
    with pytest.raises(ValueError, match="labels like"):
        part.partial_fit(X[:2], [1, 2])
    assert np.array_equal(part.predict_proba(X), before), "an error changes nothing"
    part.partial_fit(X[~first], y[~first])
    assert np.allclose(part.predict_proba(X), whole.predict_proba(X), atol=0.05)
    assert (part.predict(X) == y).mean() > 0.9
    zero_shot = ImageClassifier("demo", "text").partial_fit(X[first], y[first]).partial_fit(X[~first], y[~first])
    assert set(zero_shot.predict(X)) <= set(y.tolist())


def test_fit_that_fails_leaves_the_earlier_fit(digits, tiny_model):
    X, y = digits_as_images()
    fresh = ImageClassifier("demo", "lda")
    with pytest.raises(ValueError, match="inconsistent"):
        fresh.partial_fit(X, y[:-1])
    with pytest.raises(NotFittedError):
        fresh.predict(X)
    fitted = ImageClassifier("demo", "lda").fit(X, y).set_params(model=str(tiny_model))
    with pytest.raises(ValueError, match="inconsistent"):
        fitted.fit(X, y[:-1])
    with pytest.raises(ValueError, match="has changed since this classifier was fitted"):
        fitted.predict(X)


def digits_as_images():
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = np.flatnonzero(digits.target < 3)[:60]
    return (digits.images[rows] * 15.9).astype(np.uint8), np.array(["zero", "one", "two"])[digits.target[rows]]
