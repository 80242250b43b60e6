"""Values that a classifier derives from its buffers follow every change of the buffers."""

import copy

import pytest
import torch
from reference import randn
from torch.nn import functional as F

from dulbe_peft.classifiers import make_classifier

FEATURES = randn(6, 16, seed=4)
TEXTS = F.normalize(randn(3, 16, seed=7), dim=1)
QUICK = {"ranpac": "ranpac:features=50"}


def learned(name):
    classifier = make_classifier(QUICK.get(name, name), 16, 100.0)
    classifier.add_classes(["a", "b", "c"], randn(30, 16, seed=1), torch.arange(30) % 3, randn(3, 16, seed=2))
    return classifier


def fresh(classifier):
    """Return the scores of a copy, which has no cached values."""
    return copy.deepcopy(classifier)(FEATURES)


def test_replaced_or_overwritten_texts_of_a_head_take_effect():
    head = learned("bridge")
    before = head(FEATURES)
    head.text_embeds = TEXTS.clone()
    replaced = head(FEATURES)
    assert torch.equal(replaced, fresh(head)) and not torch.allclose(replaced, before)
    head.text_embeds.copy_(TEXTS.flip(0))
    assert torch.equal(head(FEATURES), fresh(head)) and not torch.allclose(head(FEATURES), replaced)
    head.load_state_dict(learned("bridge").state_dict())
    assert torch.equal(head(FEATURES), before)


@pytest.mark.parametrize("name", ["text", "bridge", "prototype", "lda", "gda", "ridge", "ranpac", "bayes"])
def test_every_replaced_buffer_takes_effect(name):
    classifier = learned(name)
    classifier(FEATURES)
    for buffer, value in classifier.tensors().items():
        if value.is_floating_point():
            setattr(classifier, buffer, value.flip(0))
            assert torch.equal(classifier(FEATURES), fresh(classifier)), buffer
            setattr(classifier, buffer, value)


def test_derived_values_are_computed_once_until_a_buffer_changes(monkeypatch):
    head = learned("bridge")
    head(FEATURES)
    monkeypatch.setattr("dulbe_peft.classifiers.bridge.bridge_prototypes", None)
    head(FEATURES)


@pytest.mark.parametrize("name", ["bayes", "bridge", "lda"])
def test_saved_classifier_has_what_was_written_through_data(name, tmp_path):
    classifier = learned(name)
    before = classifier(FEATURES)
    buffer = "visual_prototypes" if name == "bridge" else "sums"
    tensor = classifier.tensors()[buffer]
    tensor.data.copy_(tensor.roll(1, dims=0))  # torch does not count this write
    classifier.save_pretrained(tmp_path)
    saved, state = type(classifier).from_pretrained(tmp_path), type(classifier)(classifier.embed_dim)
    state.load_state_dict(classifier.state_dict())
    assert not torch.allclose(saved(FEATURES), before)
    assert torch.allclose(saved(FEATURES), state(FEATURES), atol=1e-3)
    assert torch.equal(classifier(FEATURES), saved(FEATURES))
