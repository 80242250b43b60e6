"""Base layers that gain hooks, offloading or quantisation after injection, and base weights that change."""

import copy

import accelerate
import pytest
import torch
from adapted_clip import CONFIG, PIXELS, image_features, learned, outputs, random_modes, randomise
from peft import PeftModel, get_peft_model
from stepping import update
from torch import nn

from dulbe_peft import DualModeLoraConfig, OccupationStatistics, allocate_modes, collect_statistics, probe_gradients
from dulbe_peft.adapter.base import DualModeLayer


@pytest.fixture(params=["weight", "factors"])
def model(request, tiny_clip):
    return learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, fold=request.param)))


def layer_of(model, name="fc1"):
    return next(layer for key, layer in model.dual_mode_layers().items() if key.endswith(name))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def loss_fn(model, batch):
    return model.get_image_features(pixel_values=batch).pooler_output.square().mean(), len(batch)


def test_base_layer_with_hooks_or_replaced_forward_is_called(model):
    expected, calls = image_features(model), []
    probe = probe_gradients(model, [PIXELS], loss_fn)
    linear = layer_of(model).base_layer
    hook = linear.register_forward_hook(lambda module, args, result: calls.append(result))
    assert_close(image_features(model), expected)
    assert_close(dict(probe_gradients(model, [PIXELS], loss_fn)), dict(probe))
    for scale in (0.0, 0.5):
        with model.scaled(scale):
            hooked = image_features(model)
            hook.remove()
            assert_close(image_features(model), hooked)  # the hook may also be removed inside a block
            hook = linear.register_forward_hook(lambda module, args, result: calls.append(result))
    hook.remove()
    assert len(calls) == 4
    linear.forward = lambda x: nn.functional.linear(x, linear.weight, linear.bias) + 1
    assert not torch.allclose(image_features(model), expected, atol=1e-3)
    del linear.forward
    assert_close(image_features(model), expected)
    with model.held_weights():  # the layer is plain when the block begins
        hook = linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        assert not torch.allclose(image_features(model), expected, atol=1e-3)
        hook.remove()
        assert_close(image_features(model), expected)


def test_outputs_are_the_same_after_accelerate_offloads_the_model(model, tmp_path):
    expected = outputs(model)
    with model.previous_task():
        before = image_features(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert layer_of(model).base_layer.weight.is_meta and next(model.shared_parameters()).is_meta
    for offloaded, output in zip(outputs(model), expected, strict=True):
        assert_close(offloaded, output)
    with model.previous_task():
        assert_close(image_features(model), before)
    with model.disable_adapter():
        assert not torch.allclose(image_features(model), expected[0], atol=1e-3)


def test_adapter_works_after_torchao_quantises_its_base_layers(model):
    torchao = pytest.importorskip("torchao.quantization")
    expected = image_features(model)
    base_layers = {id(layer.base_layer) for layer in model.dual_mode_layers().values()}
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(version=2), lambda module, _: id(module) in base_layers)
    layers = [module for module in model.modules() if isinstance(module, DualModeLayer)]
    assert all(layer.packed and not layer.plain for layer in layers if id(layer.base_layer) in base_layers)
    torch.testing.assert_close(image_features(model), expected, atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match="is quantised"):
        model.merge_adapter()


def test_writes_through_data_are_noticed_on_save_load_fold_and_merge(tiny_clip, tmp_path):
    def change_weights_then(refresh):
        model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)))
        image_features(model)
        for layer in model.dual_mode_layers().values():
            layer.base_layer.weight.data.mul_(2)
            layer.dulbe_history_B["default"].data.mul_(2)
        refresh(model)
        return image_features(model), image_features(copy.deepcopy(model))  # a copy has no cached weight

    def merge(model):
        model.merge_adapter()
        model.unmerge_adapter()

    modes = {}

    def begin(model):
        modes.update(modes or random_modes(model))
        model.begin_task(modes)

    state = {}
    learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG))).save_pretrained(tmp_path / "other")
    for refresh in (
        lambda model: model.save_pretrained(tmp_path / "saved"),
        lambda model: model.load_adapter(tmp_path / "other", "default"),
        lambda model: model.load_state_dict(state or model.state_dict()),
        merge,
        begin,
        lambda model: model.fold_task(),
    ):
        features, expected = change_weights_then(refresh)
        assert torch.equal(features, expected)


def test_float64_base_merges_in_float64(tiny_clip):
    torch.manual_seed(1)
    model = learned(get_peft_model(tiny_clip().double(), DualModeLoraConfig(**CONFIG)))
    layer, text = layer_of(model), model.get_base_model().text_model.encoder.layers[0].mlp.fc1
    deltas = {layer: update(layer), text: text.dulbe_text_B["default"] / 8 @ text.dulbe_text_A["default"]}
    expected = {merged: merged.base_layer.weight + delta for merged, delta in deltas.items()}
    model.merge_adapter()
    for merged, weight in expected.items():
        torch.testing.assert_close(merged.base_layer.weight, weight, rtol=1e-13, atol=1e-15)


def test_fold_as_factors_equals_fold_as_weight_and_caches_nothing(tiny_clip, tmp_path):
    torch.manual_seed(1)
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, fold="weight")), tasks=3)
    model.save_pretrained(tmp_path)
    config = DualModeLoraConfig.from_pretrained(tmp_path)
    config.fold = "factors"
    other = PeftModel.from_pretrained(tiny_clip(), tmp_path, config=config)
    assert_close(image_features(other), image_features(model))
    with other.held_weights():
        assert_close(image_features(other), image_features(model))
    assert all(not layer._weights for layer in other.dual_mode_layers().values())
    assert all(layer._weights for layer in model.dual_mode_layers().values())
    grads = []
    for trained in (model, other):
        for parameter in (*trained.shared_parameters(), *trained.residual_parameters()):
            parameter.requires_grad_(True)
        loss_fn(trained, PIXELS)[0].backward()
        grads.append([parameter.grad for parameter in trained.shared_parameters()])
    assert_close(*grads)


def test_previous_task_uses_modules_to_save_from_before_the_task(tiny_clip):
    config = DualModeLoraConfig(**CONFIG, modules_to_save=["visual_projection", "text_projection"])
    model = get_peft_model(tiny_clip(), config)
    with pytest.raises(ValueError, match=r"modules_to_save \['visual_projection'\].*call begin_task first"):
        model.previous_task()
    for _ in range(2):
        model.begin_task(random_modes(model))
        before = image_features(model)
        for _ in range(3):
            randomise(p for p in model.parameters() if p.requires_grad)
            with torch.no_grad(), model.previous_task():
                assert torch.equal(model.get_image_features(pixel_values=PIXELS).pooler_output, before)
            assert not torch.allclose(image_features(model), before, atol=1e-3)
    saved = model.state_dict()
    assert not any("beginning" in key for key in saved)
    model.fold_task()
    twin = copy.deepcopy(model)
    with model.previous_task():
        assert torch.equal(image_features(model), image_features(twin))
        for wrong in (copy.deepcopy, torch.nn.Module.state_dict, torch.nn.Module.double):
            with pytest.raises(ValueError, match="previous_task is running, in which modules_to_save"):
                wrong(model)
    assert torch.equal(image_features(model), image_features(twin))


def test_begin_task_plans_with_the_ranks_of_the_adapter(tiny_clip):
    config = DualModeLoraConfig(shared_rank=2, residual_rank=3, support_rank=5, rank_pattern={"fc2": 4})
    model, stats = get_peft_model(tiny_clip(), config), OccupationStatistics()
    collect_statistics(model, [PIXELS], loss_fn, stats)
    probe = probe_gradients(model, [PIXELS], loss_fn)
    modes = allocate_modes(probe, stats)
    assert {bases.support_rank for bases in modes.values()} == {5}
    assert all(m.residual.shape[1] == (4 if name.endswith("fc2") else 3) for name, m in modes.items())
    assert {bases.support_rank for bases in allocate_modes(probe, stats, support_rank=4).values()} == {4}
    for plan in ((probe, stats), (dict(probe), stats), (modes,)):
        model.begin_task(*plan)
        for name, layer in model.dual_mode_layers().items():
            assert torch.equal(layer.dulbe_P["default"], torch.cat([modes[name].shared, modes[name].residual], dim=1))
    with pytest.raises(TypeError, match="stats can only be given with gradients"):
        model.begin_task(modes, stats)
    with pytest.raises(TypeError, match="modes must be a mapping of layer names to ModeBases"):
        model.begin_task([probe])
