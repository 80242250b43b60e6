"""A classifier by itself answers the same whatever the global settings of torch, or says that it cannot."""

import numpy as np
import pytest
import torch
from taught import KINDS, NAMED, SPECS

from dulbe_peft.classifiers import make_classifier


@pytest.fixture
def restored():
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def data(classes, seed):
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randn(6, 16, generator=generator, dtype=torch.float32)
    labels = torch.arange(classes).repeat(5)
    return texts[:classes], labels, torch.randn(len(labels), 16, generator=generator, dtype=torch.float32)


def taught(name):
    classifier = make_classifier(SPECS[name], 16, 10.0)
    texts, labels, noise = data(6, seed=1)
    images = texts[labels] + noise
    early, old = labels < 3, texts if classifier.reads_text else None
    classifier.add_classes(list("abc"), images[early], labels[early], None if old is None else old[:3])
    classifier.add_classes(list("def"), images[~early], labels[~early] - 3, old)
    if "update" in classifier.rule.can:
        classifier.update_classes(images[:2], labels[:2])
    return classifier, classifier(images), classifier.probabilities(images)


@pytest.mark.plain(*KINDS)
@pytest.mark.parametrize("name", NAMED)
def test_float64_by_default_changes_no_answer_of_a_classifier(name, restored):
    expected, scores, shares = taught(name)
    torch.set_default_dtype(torch.float64)
    classifier, *answers = taught(name)
    for before, after in zip((scores, shares), answers, strict=True):
        assert torch.equal(before, after) and before.dtype == after.dtype
    for key, tensor in expected.tensors().items():
        assert torch.equal(tensor, classifier.tensors()[key]) and tensor.dtype == classifier.tensors()[key].dtype, key


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda rows: rows.to_sparse(), "image_embeds must be a dense tensor with values, .*sparse_coo"),
        (lambda rows: rows.to("meta"), "image_embeds must be a dense tensor with values, .*'meta'"),
    ],
)
def test_features_without_dense_values_are_refused(convert, message):
    classifier, *_ = taught("lda")
    with pytest.raises(ValueError, match=message):
        classifier(convert(torch.rand(2, 16)))
    with pytest.raises(ValueError, match=message):
        classifier.add_classes(["g"], convert(torch.rand(2, 16)), [0, 0])


def test_default_device_without_values_is_refused(restored):
    classifier, *_ = taught("lda")
    torch.set_default_device("meta")
    for call in (
        lambda: classifier(np.ones((2, 16))),
        lambda: classifier.add_classes(["g"], np.ones((2, 16)), np.zeros(2, np.int64)),
    ):
        with pytest.raises(ValueError, match="default device is 'meta', whose tensors have no values"):
            call()
    made = make_classifier("lda", 16, 10.0)
    torch.set_default_device(None)
    with pytest.raises(ValueError, match="the classifier is on the device 'meta', whose tensors have no values"):
        made.add_classes(["a"], np.ones((2, 16)), np.zeros(2, np.int64))
