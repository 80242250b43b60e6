"""A sweep over all fields of each model's configuration: those that change features must be `base_settings`."""

import copy
import inspect
import re

import pytest
import tiny_encoders as tiny
import torch
import transformers.masking_utils
from transformers.initialization import no_init_weights

from dulbe_peft.adapter.saved import base_settings
from dulbe_peft.encoders.loading import (
    ImageOnlyProcessor,
    has_text,
    pixel_values,
    tokenize,
    unit_image_embeds,
    unit_text_embeds,
)
from dulbe_peft.encoders.registry import ENCODERS

READ = re.compile(r"""config\.(\w+)|getattr\(\s*(?:self\.)?config,\s*"(\w+)\"""")
NO_SETTINGS = {"vision_config", "text_config", "model_type", "architectures", "transformers_version", "dtype"}


def changed_values(value):
    """Return other values of a field to try."""
    if value is None or isinstance(value, bool):
        return [each for each in (True, False) if each != value]
    if isinstance(value, int):
        return [value + 1, max(value // 2, 1), 2 * value, 0, None]
    return [10 * value + 0.1] if isinstance(value, float) else ["relu"]


def fields(config, source):
    """Return the fields of a configuration with their values, and those that the source code reads and it lacks."""
    read = {name for pair in READ.findall(source) for name in pair if name}
    for name in sorted((set(config.to_dict()) | read) - NO_SETTINGS):
        value = getattr(config, name, None)
        if value is None or isinstance(value, (bool, int, float, str)):
            yield name, value


@pytest.mark.rare("siglip", "siglip2", "metaclip_2", "chinese_clip", "altclip")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", ENCODERS)
def test_field_that_changes_features_but_no_weight_is_a_base_setting(kind):
    model, processor = tiny.make_model(kind), tiny.make_processor(kind)
    if not hasattr(processor, "image_processor"):
        processor = ImageOnlyProcessor(processor)
    pixels = torch.stack([pixel_values(processor, picture) for picture in tiny.pictures()[:2]])
    tokens = tokenize(processor, ["a photo of the cat.", "dog"], model) if has_text(model) else None
    known, weights = base_settings(model), model.state_dict()
    source = inspect.getsource(inspect.getmodule(type(model))) + inspect.getsource(transformers.masking_utils)

    @torch.no_grad()
    def features(model):
        for attention in ("eager", "sdpa"):  # is_causal of a vision tower changes only the second one
            model.set_attn_implementation(attention)
            yield unit_image_embeds(model, pixels)
            if tokens is not None:
                yield unit_text_embeds(model, tokens)

    expected, changing, silent = list(features(model)), set(), set()
    parts = [name for name in ("vision_config", "text_config") if hasattr(model.config, name)]
    for part in [*parts, ""]:
        for name, value in fields(getattr(model.config, part) if part else model.config, source):
            for other in changed_values(value):
                config = copy.deepcopy(model.config)
                try:  # a value with which nothing fits is not silent
                    setattr(getattr(config, part) if part else config, name, other)
                    with no_init_weights():
                        changed = type(model)(config).eval()
                    changed.load_state_dict(weights)
                    # Where the rows of a layer are computed in parts, only rounding differs.
                    pairs = zip(features(changed), expected, strict=True)
                    differs = any((one - two).abs().max() > 1e-5 for one, two in pairs)
                except Exception:
                    continue
                if differs:
                    changing.add(name)
                    if base_settings(changed) == known:
                        silent.add((part, name, other))
    assert {"hidden_act", "layer_norm_eps", "num_attention_heads"} <= changing and not silent
