"""The stock-LoRA export, read back by PEFT in a process that cannot import this package."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from test_model import CONFIG, PIXELS, image_features, random_modes, randomise, text_features

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.export import export_lora


@pytest.mark.parametrize("modules_to_save", [None, ["visual_projection"]])
def test_a_process_without_this_package_gets_the_same_outputs(tiny_clip, tmp_path, modules_to_save):
    base = tiny_clip()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, DualModeLoraConfig(modules_to_save=modules_to_save, **CONFIG))
    for _ in range(3):
        model.begin_task(random_modes(model))
        randomise(p for p in model.parameters() if p.requires_grad)
    export_lora(model, tmp_path / "lora")
    torch.save((PIXELS, image_features(model), text_features(model)), tmp_path / "expected.pt")
    script = f"""
        import sys, torch
        sys.modules["dulbe_peft"] = None
        from peft import PeftModel
        from transformers import CLIPModel
        pixels, images, texts = torch.load({str(tmp_path / "expected.pt")!r})
        base = CLIPModel.from_pretrained({str(tmp_path / "base")!r})
        model = PeftModel.from_pretrained(base, {str(tmp_path / "lora")!r})
        with torch.no_grad():
            ids = torch.tensor([[97, 1, 2, 98], [97, 3, 98, 98]])
            found = model.get_image_features(pixel_values=pixels).pooler_output
            torch.testing.assert_close(found, images, atol=2e-6, rtol=2e-6)
            found = model.get_text_features(input_ids=ids).pooler_output
            torch.testing.assert_close(found, texts, atol=2e-6, rtol=2e-6)
    """
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(script)], check=True)


def test_factors_are_ours_bit_for_bit(tiny_clip, tmp_path):
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG))
    for _ in range(2):
        model.begin_task(random_modes(model))
        randomise([*model.shared_parameters(), *model.residual_parameters()])
    saved = load_file(export_lora(model, tmp_path) / "adapter_model.safetensors")
    for name, layer in model.dual_mode_layers().items():
        down = torch.cat([layer.dulbe_history_P["default"], layer.dulbe_P["default"]], dim=1)
        assert torch.equal(saved[f"base_model.model.{name}.lora_A.weight"], down.T)
        assert torch.equal(saved[f"base_model.model.{name}.lora_B.weight"][:, :3], layer.dulbe_history_B["default"])
