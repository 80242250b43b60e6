"""A model folder whose config.json was edited: a sentence says what does not fit, and nothing is drawn at random."""

import json
import logging
import shutil
from functools import reduce

import pytest
import tiny_encoders as tiny
import torch
from safetensors.torch import load_file, save_file

from dulbe_peft import load_dual_encoder

SHAPES = "weights in .* do not fit its config.json, .*has the shape"
EDITS = [
    ("vision_config.image_size", 32, SHAPES),
    ("vision_config.image_size", "x", "cannot be loaded: .*image_size"),
    ("vision_config.patch_size", 4, SHAPES),
    ("vision_config.patch_size", 0, "cannot be loaded: ZeroDivisionError"),
    ("projection_dim", 8, SHAPES),
    ("text_config.max_position_embeddings", 5, SHAPES),
    ("text_config.vocab_size", 50, SHAPES),
    ("model_type", "siglip", SHAPES),
    ("model_type", "dinov2", "the file lacks 'embeddings.cls_token'"),
    ("model_type", "bert", "not supported"),
    ("quantization_config", {"a": 1}, "cannot be loaded: .*quant"),
    # transformers would draw the third layer at random, or leave the second one out, with only a warning.
    ("vision_config.num_hidden_layers", 3, "lacks 'vision_model.encoder.layers.2.* and 15 more"),
    ("vision_config.num_hidden_layers", 1, "has 'vision_model.encoder.layers.1.*does not provide for"),
    ("vision_config.num_attention_heads", 3, "cannot be loaded: .*attention heads"),
    ("vision_config.hidden_act", "none", "cannot be loaded: KeyError"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_encoder("clip", tmp_path_factory.mktemp("edited") / "model")


@pytest.mark.plain("projection_dim", "model_type", "quantization_config", "vision_config.num_hidden_layers")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("field", "value", "message"), EDITS)
def test_edited_config_is_an_error_in_one_sentence(folder, tmp_path, field, value, message):
    copy = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    *parts, name = field.split(".")
    reduce(dict.__getitem__, parts, config)[name] = value
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        load_dual_encoder(copy)
    assert "\n" not in str(error.value)


def test_weights_that_are_left_over_are_no_news(tmp_path):
    """A published network has a head for its own classes, of which transformers would print a table."""
    folder = tiny.save_encoder("vit", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"classifier.weight": torch.zeros(3, 4)}, folder / "model.safetensors", {"format": "pt"})
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("transformers.modeling_utils")
    log.addHandler(handler)
    try:
        load_dual_encoder(folder)
        assert said == []
        type(load_dual_encoder(folder)[0]).from_pretrained(folder)
        assert "classifier.weight" in said[0], "transformers prints it, and prints it again after a model was loaded"
    finally:
        log.removeHandler(handler)
