"""The export as stock LoRA: PEFT reads it back, and it can be compressed. test_deployment runs its documented code."""

import copy
import json

import pytest
import torch
from adapted_clip import CONFIG, PIXELS, learned, outputs
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPVisionModelWithProjection

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.lora_export import export_lora


def adapted(base, **fields):
    return learned(get_peft_model(base, DualModeLoraConfig(**CONFIG, **fields)))


@pytest.mark.slow
@torch.no_grad()
def test_exported_lora_gives_the_same_outputs(tiny_clip, tmp_path):
    """Cover history, text LoRA, modules to save, a single tower, and merged, disabled and second adapters.

    With twelve blocks, the name of layer 1 is a prefix of layers 10 and 11, and PEFT shortens the list of targets.
    """
    tower, config = CLIPVisionModelWithProjection(tiny_clip().config.vision_config).eval(), tiny_clip().config
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers = 12
    two = adapted(tiny_clip())
    two.add_adapter("second", DualModeLoraConfig(shared_rank=1, residual_rank=2, support_rank=4, text_rank=3))
    two.set_adapter("second")

    def outputs_of(model):
        return outputs(model) if hasattr(model, "get_image_features") else model(pixel_values=PIXELS)[0]

    cases = [(copy.deepcopy(base), adapted(base)) for base in (CLIPModel(config).eval(), tower)]
    cases += [
        (tiny_clip(), adapted(tiny_clip(), modules_to_save=["visual_projection"])),
        (tiny_clip(), learned(two, 3)),
    ]
    for base, model in cases:
        expected = outputs_of(model)
        with model.disable_adapter():
            export_lora(model, tmp_path / "disabled")
        export_lora(model, tmp_path / "plain")
        model.merge_adapter()
        export_lora(model, tmp_path / "merged")
        for kind in ("plain", "disabled", "merged"):
            stock = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / kind).eval()
            assert isinstance(stock.active_peft_config, LoraConfig)
            torch.testing.assert_close(outputs_of(stock), expected, atol=2e-6, rtol=0)


def test_exported_factors_are_exact_and_compressed_ones_optimal(tiny_clip, tmp_path):
    """Compare with a full float64 SVD of every update. Updates of low rank stay unchanged, bit for bit."""
    config = DualModeLoraConfig(**CONFIG, text_rank=5, rank_pattern={"k_proj": 0})
    model = learned(get_peft_model(tiny_clip(), config), 3)
    exact = load_file(export_lora(model, tmp_path / "exact") / "adapter_model.safetensors")
    for name, layer in model.dual_mode_layers().items():
        down = torch.cat([layer.dulbe_history_P["default"], layer.dulbe_P["default"]], dim=1)
        up = torch.cat([layer.dulbe_history_B["default"], layer.current_up("default")], dim=1)
        assert torch.equal(exact[f"base_model.model.{name}.lora_A.weight"], down.T)
        assert torch.equal(exact[f"base_model.model.{name}.lora_B.weight"], up)
    short = load_file(export_lora(model, tmp_path / "short", compress_to=4) / "adapter_model.safetensors")
    report = json.loads((tmp_path / "short" / "compression.json").read_text())
    lost = total = 0.0
    for name, row in report["layers"].items():
        down, up = (f"base_model.model.{name}.lora_{side}.weight" for side in "AB")
        scale = 1.0 if name.startswith("vision_model") else 1 / 5
        whole = scale * exact[up].double() @ exact[down].double()
        u, s, vh = torch.linalg.svd(whole, full_matrices=False)
        best = (u[:, :4] * s[:4]) @ vh[:4]
        compressed = scale * short[up].double() @ short[down].double()
        torch.testing.assert_close(compressed, best, atol=1e-6, rtol=0)
        error = ((whole - best).norm() / whole.norm()).item()
        assert row["relative_error"] == pytest.approx(error, abs=1e-7)
        assert ((whole - compressed).norm() / whole.norm()).item() == pytest.approx(error, abs=1e-6)
        if name.startswith("vision_model") and name.endswith("k_proj"):
            assert (row["rank_before"], row["rank"], row["relative_error"]) == (3, 3, 0.0)
            assert torch.equal(short[up], exact[up]) and torch.equal(short[down], exact[down])
        else:
            assert (row["rank_before"], row["rank"]) == (5 if scale < 1 else 9, 4) and error > 0.01
        lost, total = lost + (whole - best).norm().item() ** 2, total + whole.norm().item() ** 2
    assert report["rank"] == 4 and report["relative_error"] == pytest.approx((lost / total) ** 0.5, abs=1e-7)
    assert len(report["layers"]) == 16
    stock = PeftModel.from_pretrained(tiny_clip(), tmp_path / "short")
    text = [layer for name, layer in stock.named_modules() if hasattr(layer, "scaling") and "text_model" in name]
    assert {(layer.r["default"], layer.scaling["default"]) for layer in text} == {(4, 1 / 5)}


def test_failed_export_leaves_the_earlier_export_unchanged(tiny_clip, tmp_path):
    model = adapted(tiny_clip())
    assert (export_lora(model, tmp_path, compress_to=1) / "compression.json").is_file()
    before = {path.name: path.read_bytes() for path in export_lora(model, tmp_path).iterdir()}
    assert before.keys() == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    next(model.residual_parameters()).data[0, 0] = float("nan")
    for compress_to, error, words in (
        (0, ValueError, "at least 1, got 0"),
        (1.5, TypeError, "1.5"),
        (2, ValueError, "NaN"),
    ):
        with pytest.raises(error, match=words):
            export_lora(model, tmp_path, compress_to)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
