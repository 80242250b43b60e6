"""Histories that become one matrix, ranks that differ between layers, and sums of adapters."""

import json
from dataclasses import replace

import pytest
import torch
from adapted_clip import CONFIG, PIXELS, image_features, learned, random_modes, randomise, text_features
from peft import PeftModel, get_peft_model

from dulbe_peft import DualModeLoraConfig, allocate_modes, probe_gradients
from dulbe_peft.adapter.lora_export import export_lora


def nbytes(layer):
    return layer.dulbe_history_P["default"].nbytes + layer.dulbe_history_B["default"].nbytes


def native(clip, folder):
    """Return features after loading with transformers, which reads the ranks from the configuration.

    transformers leaves tensors where they lie in the mapped file, and on some processors rounding depends on a
    tensor's address.
    """
    clip.load_adapter(str(folder))
    with torch.no_grad():
        return clip.get_image_features(pixel_values=PIXELS).pooler_output


def test_effective_weight_equals_sum_over_tasks_in_bounded_memory(tiny_clip, tmp_path):
    """Compute W_t = W_0 + sum over tasks of B_S P_S' + B_R P_R' literally in float64.

    The histories of k and v, 32 x 32, become matrices at 17 columns. Those of fc1 and fc2, 64 x 32, would become
    matrices at 22 columns, which seven tasks do not reach.
    """
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG))
    layers = model.dual_mode_layers()
    expected = {name: layer.base_layer.weight.detach().double() for name, layer in layers.items()}
    for task in range(7):
        modes = random_modes(model)
        model.begin_task(random_modes(model))  # folds the previous task; untrained modes leave no trace
        model.begin_task(modes)
        assert model.history_rank == 3 * task
        randomise((*model.shared_parameters(), *model.residual_parameters()))
        for name, layer in layers.items():
            expected[name] += layer.dulbe_shared_B["default"].detach().double() @ modes[name].shared.double().T
            expected[name] += layer.dulbe_residual_B["default"].detach().double() @ modes[name].residual.double().T
    before = image_features(model)
    model.fold_task()
    torch.testing.assert_close(image_features(model), before, atol=2e-6, rtol=1e-5)
    assert sum(layer.history_rank("default") == -1 for layer in layers.values()) == 4
    for name, layer in layers.items():
        assert nbytes(layer) <= layer.base_layer.weight.nbytes
        torch.testing.assert_close(layer.folded_weight("default").double(), expected[name], atol=2e-6, rtol=0)
    learned(model, 1)
    images = image_features(model)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(image_features(PeftModel.from_pretrained(tiny_clip(), tmp_path / "adapter")), images)
    torch.testing.assert_close(native(tiny_clip(), tmp_path / "adapter"), images, atol=5e-6, rtol=1e-5)
    vision, tower = PeftModel.from_pretrained(tiny_clip().vision_model, tmp_path / "adapter"), tiny_clip().vision_model
    tower.load_adapter(str(tmp_path / "adapter"))
    with torch.no_grad():
        states = model.get_base_model().vision_model(PIXELS).last_hidden_state
        assert torch.equal(vision(PIXELS).last_hidden_state, states)
        torch.testing.assert_close(tower(PIXELS).last_hidden_state, states, atol=5e-6, rtol=1e-5)
    export_lora(model, tmp_path / "lora")
    stock = PeftModel.from_pretrained(tiny_clip(), tmp_path / "lora")
    torch.testing.assert_close(image_features(stock), images, atol=5e-6, rtol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(image_features(merged), images, atol=5e-6, rtol=1e-5)


def test_rank_pattern_sets_the_residual_rank_of_single_layers(tiny_clip, tmp_path):
    pattern = {"fc1": 4, r"layers\.0\.self_attn\.k_proj": 0}
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, rank_pattern=pattern))
    ranks = {name: 4 if "fc1" in name else 0 if "0.self_attn.k" in name else 2 for name in model.dual_mode_layers()}
    probe = probe_gradients(model, [PIXELS], lambda m, x: (m.get_image_features(x).pooler_output.square().mean(), 3))
    modes = allocate_modes(probe, None, residual_rank=ranks)
    assert {name: mode.residual.shape[1] for name, mode in modes.items()} == ranks
    for _ in range(2):
        model.begin_task(modes)
        randomise((*model.shared_parameters(), *model.residual_parameters()))
        modes = {name: replace(mode, shared=-mode.shared) for name, mode in modes.items()}
    expected = image_features(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(image_features(PeftModel.from_pretrained(tiny_clip(), tmp_path)), expected)
    torch.testing.assert_close(native(tiny_clip(), tmp_path), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("init_weights", [True, False])
@pytest.mark.parametrize("kind", ["cat", "svd"])
def test_weighted_adapter_equals_weighted_sum_of_updates(tiny_clip, tmp_path, kind, init_weights):
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, init_weights=init_weights)), 2)
    model.add_adapter("second", DualModeLoraConfig(**CONFIG | {"residual_rank": 1}, text_rank=3))
    model.set_adapter("second")
    randomise(parameter for parameter in model.parameters() if parameter.requires_grad)
    model.add_weighted_adapter(["default", "second"], [0.7, -0.4], "sum", kind, None if kind == "cat" else 4)
    assert model.active_adapters == ["second"]
    model.set_adapter("sum")
    for layer in (module for module in model.modules() if hasattr(module, "get_delta_weight")):
        expected = 0.7 * layer.get_delta_weight("default").double() - 0.4 * layer.get_delta_weight("second").double()
        if kind == "svd":
            u, s, vh = torch.linalg.svd(expected)
            expected = (u[:, :4] * s[:4]) @ vh[:4]
        torch.testing.assert_close(layer.get_delta_weight("sum").double(), expected, atol=2e-6, rtol=0)
    model.save_pretrained(tmp_path, selected_adapters=["sum"])
    loaded = PeftModel.from_pretrained(tiny_clip(), tmp_path / "sum")
    assert torch.equal(image_features(loaded), image_features(model))
    assert torch.equal(text_features(loaded), text_features(model))
    kept = image_features(model)
    model.keep_share(0.25)  # of what was trained since the adapter was made, which is nothing
    torch.testing.assert_close(image_features(model), kept, atol=1e-6, rtol=1e-5)


def test_adapters_that_cannot_be_summed_are_refused(tiny_clip):
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)), 1)
    model.add_adapter("second", DualModeLoraConfig(**CONFIG, target_modules=["fc1"]))
    before = set(model.peft_config)
    for arguments, words in (
        ((["default", "third"], [1, 1], "sum"), "adapters must be some of"),
        ((["default"], [1, 1], "sum"), "1 adapters and 2 weights"),
        ((["default"], [float("nan")], "sum"), "weights must be a finite"),
        ((["default"], [1], "second"), "already has the adapter"),
        ((["default"], [1], "sum", "ties"), "'cat' or 'svd', got 'ties'"),
        ((["default", "second"], [1, 1], "sum"), "in different layers"),
    ):
        with pytest.raises(ValueError, match=words):
            model.add_weighted_adapter(*arguments)
    assert set(model.peft_config) == before


def test_folding_nothing_or_repeating_bases_warns(tiny_clip):
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, init_weights=False))
    model.fold_task()
    with pytest.warns(UserWarning, match="nothing to fold: no mode was trained"):
        model.fold_task()
    randomise(model.shared_parameters())
    with pytest.warns(UserWarning, match="what the previous task learned is not protected"):
        model.fold_task()
    learned(model, 2).fold_task()  # no warning, because each task has new bases
    assert model.history_rank == 12


def test_repeated_bases_warn_when_the_history_is_one_matrix(tiny_clip):
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(residual_rank=12, support_rank=4)), 4)
    model.fold_task()
    assert all(layer.history_rank("default") == -1 for layer in model.dual_mode_layers().values())
    randomise(model.shared_parameters())
    with pytest.warns(UserWarning, match="what the previous task learned is not protected"):
        model.fold_task()


def test_history_rank_is_read_from_the_tensors(tiny_clip, tmp_path):
    model = learned(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)), 3)
    model.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    assert settings["history_rank"] == 6  # load_adapter of transformers uses this value
    file.write_text(json.dumps(settings | {"history_rank": 60_000}), encoding="utf-8")
    ranks = DualModeLoraConfig.from_pretrained(tmp_path).facts.history_ranks
    assert len(ranks) == len(model.dual_mode_layers()) and set(ranks.values()) == {6}
    loaded = PeftModel.from_pretrained(tiny_clip(), tmp_path)
    assert loaded.history_rank == 6 and torch.equal(image_features(loaded), image_features(model))
