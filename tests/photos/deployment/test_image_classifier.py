"""Test scikit-learn's estimator of images, and the model as a transformer in its pipelines."""

import pickle

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from tiny_encoders import save_encoder

from dulbe_peft.data.digits import DIGITS
from dulbe_peft.photos.deployment.batches import Featurizer
from dulbe_peft.sklearn import FeatureClassifier, ImageClassifier, _encoder


@pytest.fixture(scope="module")
def images():
    """Return uint8 arrays of four digits, ten of each, and their names."""
    data = load_digits()
    rows = np.concatenate([np.flatnonzero(data.target == label)[:10] for label in range(4)])
    return (data.images[rows] * 15.9).astype(np.uint8), np.array(DIGITS)[data.target[rows]]


def test_paths_images_and_arrays_give_the_same_predictions(images, tmp_path):
    arrays, names = images
    pictures = [Image.fromarray(array) for array in arrays]
    paths = [tmp_path / f"{number}.png" for number in range(len(pictures))]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    first, *others = (ImageClassifier("demo").fit(given, names) for given in (arrays, pictures, list(map(str, paths))))
    expected = first.predict(arrays)
    for given in (pictures, paths):
        assert all((fitted.predict(given) == expected).all() for fitted in (first, *others))
    assert all((fitted.predict(arrays) == expected).all() for fitted in others)
    assert first.score(arrays, names) > 0.9 and first.classes_.tolist() == sorted(DIGITS[:4])
    probabilities = first.predict_proba(paths)
    assert probabilities.shape == (40, 4) and np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert (first.classes_[probabilities.argmax(axis=1)] == expected).all()


def test_class_names_are_put_into_the_template(images):
    arrays, names = images
    plain = ImageClassifier("demo", "text", prompt_template="a photo of the digit {}.").fit(arrays, names)
    assert plain.score(arrays, names) > 0.7
    other = ImageClassifier("demo", "text", prompt_template="{}").fit(arrays, names)
    assert not np.allclose(other.predict_proba(arrays), plain.predict_proba(arrays), atol=1e-3)


@pytest.mark.slow
def test_estimator_is_cloned_pickled_cross_validated_and_searched(images):
    arrays, names = images
    estimator = ImageClassifier("demo", "lda", prompt_template="the digit {}.")
    assert clone(estimator).get_params() == estimator.get_params()
    assert not hasattr(clone(estimator.fit(arrays, names)), "classes_")
    pickled = pickle.dumps(estimator)
    assert pickle.loads(pickled).predict(arrays).tolist() == estimator.predict(arrays).tolist()
    assert len(pickled) < 10**6
    pictures = [Image.fromarray(array) for array in arrays]
    assert cross_val_score(estimator, pictures, names, cv=4).mean() > 0.8
    search = GridSearchCV(ImageClassifier("demo"), {"classifier": ["lda", "prototype"]}, cv=2).fit(arrays, names)
    assert search.best_params_["classifier"] in ("lda", "prototype") and search.predict(arrays[:1])[0] in DIGITS


def test_changed_model_under_the_same_name_is_refused(images, tmp_path):
    arrays, names = images
    estimator = ImageClassifier(str(save_encoder("clip", tmp_path / "m")), "lda").fit(arrays, names)
    pickled = pickle.dumps(estimator)
    weights = load_file(tmp_path / "m" / "model.safetensors")
    weights["visual_projection.weight"] += 0.1
    save_file(weights, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    _encoder.cache_clear()  # as in another process
    with pytest.raises(ValueError, match=r"encoder .*m' has changed since .*: \['weights'\] differ; fit again"):
        pickle.loads(pickled).predict(arrays)
    estimator.fit(arrays, names).predict(arrays)


def test_error_names_the_entry_that_is_not_an_image(images):
    arrays, names = images
    with pytest.raises(ValueError, match=r"gone\.png\) cannot be read"):
        ImageClassifier("demo").fit([*arrays[:-1], "gone.png"], names)
    with pytest.raises(ValueError, match="image 1 is an array of float64"):
        ImageClassifier("demo").fit([arrays[0], arrays[1] / 255], names[:2])


def test_featurizer_is_a_transformer_in_a_pipeline(images):
    arrays, names = images
    pipeline = make_pipeline(Featurizer("demo"), FeatureClassifier("lda"))
    assert cross_val_score(pipeline, arrays, names, cv=4).mean() > 0.8
    fitted = clone(pipeline).fit(arrays, names)
    assert fitted[0].transform(arrays[:3]).shape == (3, fitted[1].n_features_in_)
    assert pickle.loads(pickle.dumps(fitted)).predict(arrays).tolist() == fitted.predict(arrays).tolist()


def test_model_without_a_text_encoder_learns_from_images_only(images, tmp_path):
    arrays, names = images
    estimator = ImageClassifier(str(save_encoder("dinov2", tmp_path / "model"))).fit(arrays, names)
    assert estimator.features_.texts is None and estimator.score(arrays, names) > 0.5
