"""The PEFT method: injection, moving from task to task, saving and merging."""

import copy

import adapted_clip
import pytest
import torch
from adapted_clip import CONFIG, PIXELS, image_features, outputs, random_modes, randomise, text_features
from peft import PeftModel, get_peft_model
from stepping import update
from torch import nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from dulbe_peft import DualModeLoraConfig, probe_gradients
from dulbe_peft.adapter.base import DualModeLayer


@pytest.fixture
def learned(tiny_clip):
    return adapted_clip.learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)))


def test_default_target_of_llava_is_its_vision_tower():
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    llava = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=60))
    names = list(get_peft_model(copy.deepcopy(llava), DualModeLoraConfig(**CONFIG)).dual_mode_layers())
    kinds = ("self_attn.k_proj", "self_attn.v_proj", "mlp.fc1", "mlp.fc2")
    assert names == [f"model.vision_tower.encoder.layers.{n}.{kind}" for n in range(2) for kind in kinds]
    tower = llava.model.vision_tower
    alone = get_peft_model(copy.deepcopy(tower), DualModeLoraConfig(**CONFIG)).dual_mode_layers()
    assert [f"model.vision_tower.{name}" for name in alone] == names

    model = get_peft_model(llava, DualModeLoraConfig(**CONFIG))
    inputs = {"input_ids": torch.tensor([[1, 60, 60, 60, 60, 2]]), "pixel_values": PIXELS[:1]}
    with pytest.warns(UserWarning, match=r"no gradient in 4 of 8 adapted layers.*encoder.layers.1"):
        probe = probe_gradients(model, [inputs], lambda model, batch: (model(**batch).logits.square().mean(), 1))
    assert [name for name, gradient in probe.items() if gradient.any()] == names[:4], "LLaVA leaves out the last block"
    model.begin_task(probe)
    model(**inputs).logits.square().mean().backward()
    assert [
        name for name, layer in model.dual_mode_layers().items() if layer.dulbe_shared_B["default"].grad is not None
    ] == names[:4]


def test_previous_task_restores_the_model_from_before_the_task(learned):
    learned.fold_task()
    before = image_features(learned)
    learned.begin_task(random_modes(learned))
    randomise(learned.residual_parameters())
    text = text_features(learned)
    with learned.previous_task():
        with learned.previous_task():
            pass
        assert torch.equal(image_features(learned), before) and torch.equal(text_features(learned), text)
    assert not torch.allclose(image_features(learned), before, atol=1e-4)


def test_safe_merge_refuses_nan_and_changes_no_weight(learned):
    *_, last = learned.shared_parameters()
    last.data[0, 0] = float("nan")
    before = {name: value.clone() for name, value in learned.named_parameters() if "base_layer" in name}
    for merge in (learned.merge_adapter, learned.merge_and_unload):
        with pytest.raises(ValueError, match="NaNs detected in the merged weights. The adapter default seems to be"):
            merge(safe_merge=True)
    assert all(torch.equal(value, before[name]) for name, value in learned.named_parameters() if name in before)


def test_effective_weight_follows_every_change_of_its_factors(learned):
    """Check that the weight is never stale or rounded: after in-place changes, in another precision, in autocast."""
    layer = next(iter(learned.dual_mode_layers().values()))
    base, before = layer.base_layer.weight, layer.folded_weight("default").clone()
    with torch.no_grad():
        for factor in (layer.dulbe_history_P, layer.dulbe_history_B):
            factor["default"].mul_(2)
            torch.testing.assert_close(layer.folded_weight("default") + base, 2 * before)
            factor["default"] = factor["default"] / 2
            assert torch.equal(layer.folded_weight("default"), before)
        base.mul_(2)
        torch.testing.assert_close(layer.folded_weight("default"), before + base / 2)
        layer.base_layer.load_state_dict({k: v / 2 for k, v in layer.base_layer.state_dict().items()})
        assert torch.equal(layer.folded_weight("default"), before)
    base.data = base.data + 1  # another tensor in place of the old one
    expected = layer.folded_weight("default").clone()
    torch.testing.assert_close(expected, before + 1)
    layer._weights.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.folded_weight("default"), expected)
        delta = layer.get_delta_weight("default")
    assert torch.equal(layer.get_delta_weight("default"), delta)
    learned.to(torch.bfloat16)
    assert layer.folded_weight("default").dtype == torch.bfloat16


def test_fold_in_inference_mode_and_trainable_base_weight_work(learned):
    expected = image_features(learned)
    with torch.inference_mode():
        assert torch.equal(image_features(learned), expected)
        learned.fold_task()
        assert torch.equal(image_features(learned), image_features(copy.deepcopy(learned)))
    learned.begin_task(random_modes(learned))
    weight = next(iter(learned.dual_mode_layers().values())).base_layer.weight.requires_grad_(True)
    images = learned.get_image_features(pixel_values=PIXELS).pooler_output
    torch.testing.assert_close(images.detach(), expected, rtol=1e-4, atol=1e-5)
    images.sum().backward()
    assert weight.grad.any() and all(p.grad is not None for p in learned.shared_parameters())


@pytest.mark.parametrize("tower", [CLIPVisionModel, CLIPVisionModelWithProjection])
def test_saved_adapter_moves_between_clip_classes(learned, tiny_clip, tmp_path, tower):
    def vision(model):
        with torch.no_grad():
            return model(pixel_values=PIXELS).last_hidden_state

    learned.save_pretrained(tmp_path / "clip")
    tiny_clip().save_pretrained(tmp_path / "base")
    expected = vision(learned.get_base_model().vision_model)
    alone = PeftModel.from_pretrained(tower.from_pretrained(tmp_path / "base"), tmp_path / "clip")
    assert torch.equal(vision(alone), expected)
    alone.save_pretrained(tmp_path / "tower")
    with pytest.warns(UserWarning, match="missing adapter keys"):  # the text LoRA, which the vision tower lacks
        back = PeftModel.from_pretrained(tiny_clip(), tmp_path / "tower")
    assert torch.equal(vision(back.get_base_model().vision_model), expected)


def test_load_adapter_replaces_history_of_another_length(learned, tiny_clip, tmp_path):
    learned.save_pretrained(tmp_path / "short")
    short = image_features(learned)
    learned.fold_task()
    learned.save_pretrained(tmp_path / "long")
    long = image_features(learned)
    model = PeftModel.from_pretrained(tiny_clip(), tmp_path / "long")
    assert torch.equal(image_features(model), long)
    model.load_adapter(tmp_path / "short", "default")
    assert torch.equal(image_features(model), short)
    model.load_adapter(tmp_path / "long", "other")
    model.set_adapter("other")
    assert torch.equal(image_features(model), long)


def test_configuration_sorts_sets():
    config = DualModeLoraConfig(target_modules={"v_proj", "k_proj", "fc1"}, exclude_modules={"b", "a"})
    assert config.to_dict()["target_modules"] == ["fc1", "k_proj", "v_proj"]
    assert config.to_dict()["exclude_modules"] == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"residual_rank": 40}, "shared_rank . residual_rank = 41 exceeds in_features = 32 of layer"),
        ({"target_modules": ["k_porj"]}, "not found in the base model.*Closest names.*k_proj"),
        ({"target_modules": ["patch_embedding"]}, "is a torch.nn.modules.conv.Conv2d, but only torch.nn.Linear"),
        ({"target_modules": ["attn"]}, "convert the model to the transformers layout"),
        ({"target_modules": "all-linear", "residual_rank": 39}, "= 40 exceeds in_features"),
    ],
)
def test_refused_injection_leaves_the_model_unchanged(tiny_clip, fields, words):
    base = tiny_clip()
    base.vision_model.attn = nn.MultiheadAttention(8, 2)
    keys, grads = base.state_dict().keys(), [p.requires_grad for p in base.parameters()]
    with pytest.raises(ValueError, match=words):
        get_peft_model(base, DualModeLoraConfig(**fields))
    assert base.state_dict().keys() == keys and [p.requires_grad for p in base.parameters()] == grads


def test_feature_extraction_task_type_warns():
    with pytest.warns(UserWarning, match="leave task_type unset"):
        DualModeLoraConfig(task_type="FEATURE_EXTRACTION")


def literal_update(layer):
    """Return dW in float64, computed from the factors."""
    if hasattr(layer, "dulbe_text_A"):
        return layer.scaling["default"] * layer.dulbe_text_B["default"] @ layer.dulbe_text_A["default"]
    return update(layer)


@pytest.mark.parametrize("scale", [0, 0.25, 1.0])
def test_scaled_model_equals_interpolated_weights(learned, tiny_clip, scale):
    learned, blend = learned.double(), tiny_clip().double()
    layers = {name: m for name, m in learned.base_model.model.named_modules() if isinstance(m, DualModeLayer)}
    assert {type(layer).__name__ for layer in layers.values()} == {"DualModeLinear", "TextLoraLinear"}
    expected = outputs(learned)
    with learned.disable_adapter():
        ends = {0: outputs(learned), 1: expected}
    with torch.no_grad():
        for name, layer in layers.items():
            blend.get_submodule(name).weight += scale * literal_update(layer)
    with learned.scaled(0.5), learned.scaled(scale):
        scaled = outputs(learned)
        twin = copy.deepcopy(learned)
    torch.testing.assert_close(scaled, outputs(blend), rtol=1e-12, atol=1e-12)
    assert scale not in ends or all(map(torch.equal, scaled, ends[scale]))  # scales 0 and 1 are exact
    with pytest.raises(KeyError), learned.scaled(0.5):
        raise KeyError
    for model in (learned, twin):  # after the block, also in a copy that was made inside it
        assert all(map(torch.equal, outputs(model), expected))


def test_invalid_scales_and_calls_on_merged_or_several_adapters_are_refused(learned):
    for scale, error in ((1.5, ValueError), (float("nan"), ValueError), ("0.5", TypeError)):
        with pytest.raises(error, match="scale must be"), learned.scaled(scale):
            raise AssertionError
    learned.merge_adapter()
    for refused in (lambda: learned.scaled(0.5), learned.fold_task, lambda: learned.begin_task(random_modes(learned))):
        with pytest.raises(ValueError, match="call unmerge_adapter"):
            refused()
    learned.unmerge_adapter()
    learned.active_peft_config.modules_to_save = ["visual_projection"]
    with pytest.raises(ValueError, match="modules_to_save"):
        learned.scaled(0.5)
    learned.add_adapter("second", DualModeLoraConfig(**CONFIG))
    learned.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="one adapter must be active"):
        learned.fold_task()
