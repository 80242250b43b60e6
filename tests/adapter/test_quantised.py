"""Base layers that are quantised or have a forward of their own: everything works on them except merging."""

import copy
import importlib

import lives
import pytest
import stepping
import torch
from adapted_clip import CONFIG, PIXELS, image_features, outputs
from peft import PeftModel, get_peft_model
from torch import nn

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    OccupationStatistics,
    allocate_modes,
    collect_statistics,
    probe_gradients,
)
from dulbe_peft.adapter.lora_export import export_lora
from dulbe_peft.strategies import make_strategy


class Packed(nn.Linear):
    """A linear layer whose weight is stored as one byte per number, in a different shape."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        self.scale = linear.weight.detach().abs().max() / 127
        packed = (linear.weight.detach() / self.scale).round().to(torch.int8).reshape(-1, 1)
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), linear.bias

    def dequantized(self):
        return (self.weight.float() * self.scale).reshape(self.out_features, self.in_features)

    def forward(self, x):
        return nn.functional.linear(x, self.dequantized(), self.bias)


def pack(clip):
    """Return the model with packed layers, and a copy with the same values in plain layers."""
    plain = copy.deepcopy(clip)
    for name, module in list(clip.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            packed = Packed(module)
            parent, _, child = name.rpartition(".")
            setattr(clip.get_submodule(parent), child, packed)
            plain.get_submodule(name).weight.data = packed.dequantized()
    return clip, plain


def quantise(clip):
    """Quantise the model with torchao, and return it with a copy that has the same values in plain layers."""
    torchao = importlib.import_module("torchao.quantization")
    torchao.quantize_(clip, torchao.Int8WeightOnlyConfig(version=2), lambda _, name: name.endswith(("fc1", "k_proj")))
    plain = copy.deepcopy(clip)
    for module in plain.modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "dequantize"):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return clip, plain


@pytest.fixture(params=[pack, quantise])
def pair(request, tiny_clip):
    if request.param is quantise:
        pytest.importorskip("torchao")
    torch.manual_seed(3)
    return request.param(tiny_clip())


def loss_fn(model, batch):
    return model.get_image_features(pixel_values=batch).pooler_output.square().mean(), len(batch)


def learn(model, tasks=2):
    """Learn tasks step by step: probe, allocate, one step, fold, statistics."""
    statistics, probes = OccupationStatistics(), []
    for task in range(tasks):
        probes.append(probe_gradients(model, [PIXELS + task], loss_fn))
        model.begin_task(allocate_modes(probes[-1], statistics, residual_rank=2, support_rank=4))
        with model.held_weights():
            loss_fn(model, PIXELS + task)[0].backward()
        for parameter in (*model.shared_parameters(), *model.residual_parameters()):
            parameter.data -= 10 * parameter.grad
        collect_statistics(model, [PIXELS], loss_fn, into=statistics)
    return probes


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_quantised_model_learns_like_its_dequantised_copy(pair, tmp_path):
    bases = copy.deepcopy(pair)
    models = [get_peft_model(base, DualModeLoraConfig(**CONFIG)) for base in pair]
    assert all(layer.packed for name, layer in models[0].dual_mode_layers().items() if "fc1" in name)
    models[1].load_state_dict({k: v for k, v in models[0].state_dict().items() if "dulbe_" in k}, strict=False)
    pristine = image_features(models[0])
    assert_close(*map(learn, models))
    packed, plain = models
    assert not torch.allclose(image_features(packed), pristine, atol=1e-3)
    assert_close(outputs(packed), outputs(plain))
    for scale in (0.0, 0.5):
        with packed.scaled(scale), plain.scaled(scale):
            assert_close(image_features(packed), image_features(plain))
    with packed.previous_task(), plain.previous_task():
        assert_close(image_features(packed), image_features(plain))
    packed.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(bases[0], tmp_path / "adapter")
    assert torch.equal(image_features(loaded), image_features(packed))
    export_lora(packed, tmp_path / "lora")
    assert_close(image_features(PeftModel.from_pretrained(bases[1], tmp_path / "lora")), image_features(plain))


def test_merging_into_quantised_layers_is_refused(pair):
    model = get_peft_model(pair[0], DualModeLoraConfig(**CONFIG, init_weights=False))
    expected = image_features(model)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=r"layers\.0\.(self_attn\.k_proj|mlp\.fc1).* is quantised"):
            merge()
    assert torch.equal(image_features(model), expected)
    name, layer = next((name, layer) for name, layer in model.dual_mode_layers().items() if "fc1" in name)
    if isinstance(layer.base_layer, Packed):
        with pytest.raises(ValueError, match="weight of a Packed, which cannot be unpacked"):
            layer.get_base_weight()
    else:
        assert torch.equal(layer.get_base_weight(), pair[1].get_submodule(name).weight)


def test_learner_over_quantised_model_is_saved_and_loaded(tmp_path):
    pytest.importorskip("torchao")
    clip, processor = lives.tiny_base()
    base = quantise(copy.deepcopy(clip))[0]
    model = get_peft_model(copy.deepcopy(base), DualModeLoraConfig(residual_rank=2, support_rank=4))
    learner = ClassIncrementalLearner(model, processor, args=lives.tiny_learner().args)
    lives.learned(learner, 2).save_pretrained(tmp_path / "saved")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", base_model=base)
    images = lives.images_of(0, 1, 2, seed=9)
    assert torch.equal(learner.image_embeds(images), loaded.image_embeds(images))


@pytest.mark.parametrize("strategy", ["sd_lora", "cl_lora", "lora_sub"])
def test_weight_replacing_strategies_work_on_quantised_layers(tiny_clip, strategy):
    method, features = make_strategy(strategy), []
    for base in pack(tiny_clip()):
        torch.manual_seed(0)
        adapter, memory = stepping.adapted(base), None
        for index in range(2):
            memory = stepping.learn(method, adapter, index, memory)
        features.append(stepping.features(adapter))
    assert_close(*features)
