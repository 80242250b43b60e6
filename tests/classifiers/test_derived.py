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


def test_texts_that_are_set_are_normalised_as_those_that_are_learned():
    head, long = learned("bridge"), learned("bridge")
    head.text_embeds, long.text_embeds = TEXTS.clone(), 7 * TEXTS
    assert torch.allclose(long.text_embeds, TEXTS, atol=1e-6)
    torch.testing.assert_close(long(FEATURES), head(FEATURES))


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("text_embeds", torch.full((3, 16), float("nan")), "text_embeds contains NaN"),
        ("text_embeds", torch.zeros(3, 16), "text_embeds must consist of unit vectors"),
        ("text_embeds", TEXTS[:2], r"text_embeds must be \(3, 16\) for 3 classes, got \(2, 16\)"),
        ("counts", torch.tensor([1, 1, -1]), "counts must be numbers of images"),
        ("logit_scale", -1.0, "the 'bridge' classifier: logit_scale must .* positive"),
        ("logit_scale", float("nan"), "the 'bridge' classifier: logit_scale must be a finite number"),
        ("reliability_temperature", 0.0, "reliability_temperature must .*positive|greater than 0"),
    ],
)
def test_invalid_value_that_is_set_is_refused_and_changes_nothing(attribute, value, words):
    head = learned("bridge")
    before = head(FEATURES)
    with pytest.raises(ValueError, match=words):
        setattr(head, attribute, value)
    assert torch.equal(fresh(head), before)


def test_invalid_tensor_that_is_written_in_place_is_not_saved(tmp_path):
    head = learned("bridge")
    head.text_embeds.mul_(2)
    with pytest.raises(ValueError, match="text_embeds must consist of unit vectors"):
        head.save_pretrained(tmp_path / "head")
    assert not (tmp_path / "head").exists()


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
