"""Adapters move between an encoder and its vision tower alone, for every encoder that has a text tower."""

import copy
from functools import cache

import pytest
import torch
import transformers
from adapted_clip import CONFIG, learned
from copies import copies
from peft import PeftModel, get_peft_model
from tiny_encoders import WITH_TEXT, make_image_processor, make_model, pictures

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.encoders.registry import ENCODERS, VISION_TOWERS

NAMES = [ENCODERS[name].model.removesuffix("Model") + "VisionModel" for name in WITH_TEXT]
TOWERS = [
    (encoder, tower)
    for encoder, name in zip(WITH_TEXT, NAMES, strict=True)
    for tower in (name, name + "WithProjection")
    if hasattr(transformers, tower)
]


@cache
def encoders(model_type):
    """Return copies of an encoder with one block in its vision tower."""
    model = make_model(model_type)
    model.vision_model.encoder.layers = model.vision_model.encoder.layers[:1]
    model.config.vision_config.num_hidden_layers = 1
    return copies(model)


@cache
def towers_alone(model_type, name):
    """Return copies of an encoder's vision tower as a model of its own, with the encoder's weights."""
    encoder = encoders(model_type)()
    config = copy.deepcopy(encoder.config.vision_config)
    if "Projection" in name:
        config.projection_dim = encoder.config.projection_dim
    tower = getattr(transformers, name)(config).eval()
    weights = encoder.state_dict()
    if "Projection" not in name:
        weights = {key.removeprefix("vision_model."): value for key, value in weights.items()}
    missing = tower.load_state_dict(weights, strict=False).missing_keys
    assert not missing and tower.config.model_type in VISION_TOWERS
    return copies(tower)


def pixels(model_type):
    return dict(make_image_processor(model_type)(images=pictures()[:2], return_tensors="pt"))


@torch.no_grad()
def states(model, inputs):
    tower = model.get_base_model() if isinstance(model, PeftModel) else model
    tower = getattr(tower, "vision_model", tower)
    return tower(**inputs).last_hidden_state


def test_every_encoder_has_a_tower_of_its_own():
    assert {encoder for encoder, _ in TOWERS} == set(WITH_TEXT) and len(TOWERS) >= 8


@pytest.mark.plain("CLIPVisionModel-default", "SiglipVisionModel-all-linear", "AltCLIPVisionModel-names")
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # the text LoRA, which a vision tower lacks
@pytest.mark.parametrize("targets", [None, "all-linear", ["fc1", "fc2"]], ids=["default", "all-linear", "names"])
@pytest.mark.parametrize(("model_type", "name"), TOWERS, ids=[name for _, name in TOWERS])
def test_adapter_moves_between_an_encoder_and_its_vision_tower(model_type, name, targets, tmp_path):
    inputs = pixels(model_type)
    tower = towers_alone(model_type, name)
    whole = learned(get_peft_model(encoders(model_type)(), DualModeLoraConfig(**CONFIG, target_modules=targets)))
    whole.save_pretrained(tmp_path / "whole")
    expected = states(whole, inputs)
    alone = PeftModel.from_pretrained(tower(), tmp_path / "whole")
    assert torch.equal(states(alone, inputs), expected)
    native = tower()
    native.load_adapter(str(tmp_path / "whole"))
    assert torch.equal(states(native, inputs), expected)

    fresh = get_peft_model(tower(), DualModeLoraConfig(**CONFIG, target_modules=targets))
    layers = fresh.dual_mode_layers()
    assert len(layers) == len(whole.dual_mode_layers())  # the pooling head and the projections are left alone
    assert all("layers." in layer for layer in layers)
    learned(fresh).save_pretrained(tmp_path / "alone")
    back = PeftModel.from_pretrained(encoders(model_type)(), tmp_path / "alone")
    assert torch.equal(states(back, inputs), states(fresh, inputs))
    assert not torch.equal(states(back, inputs), expected)
