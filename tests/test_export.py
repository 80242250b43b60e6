"""The stock-LoRA export: read back by PEFT in a process that cannot import this package, and cut to a lower rank."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from test_model import CONFIG, PIXELS, image_features, random_modes, randomise, text_features
from transformers import CLIPVisionModel, CLIPVisionModelWithProjection

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.adapter.export import export_lora

READER = """
    import sys, torch
    sys.modules["dulbe_peft"] = None  # any import of it fails
    import transformers
    from peft import PeftModel

    folder = sys.argv[1]
    pixels, ids, cases = torch.load(folder + "/cases.pt")
    for name, (kind, base, images, texts) in cases.items():
        base = getattr(transformers, kind).from_pretrained(f"{folder}/{base}")
        model = PeftModel.from_pretrained(base, f"{folder}/{name}").eval()
        with torch.no_grad():
            if kind == "CLIPModel":
                found = model.get_image_features(pixel_values=pixels).pooler_output
                text = model.get_text_features(input_ids=ids).pooler_output
                torch.testing.assert_close(text, texts, atol=2e-6, rtol=0)
            else:
                found = model(pixel_values=pixels)[0]
        torch.testing.assert_close(found, images, atol=2e-6, rtol=0)
        print("equal", name)
    assert not any(name.startswith("dulbe") and module for name, module in sys.modules.items())
"""


def learn(model, tasks=2):
    """`tasks` - 1 folded tasks and a current one, every trainable parameter random."""
    for _ in range(tasks):
        model.begin_task(random_modes(model))
        randomise(p for p in model.parameters() if p.requires_grad)
    return model.eval()


def adapted(base, **fields):
    return learn(get_peft_model(base, DualModeLoraConfig(**CONFIG, **fields)))


def tower(kind, clip):
    vision = kind(clip.config.vision_config).eval()
    return vision


@torch.no_grad()
def outputs(model):
    if hasattr(model, "get_image_features"):
        return image_features(model), text_features(model)
    return model(pixel_values=PIXELS)[0], None


@pytest.mark.slow
def test_a_process_without_this_package_gets_the_same_outputs(tiny_clip, tmp_path):
    """History, text LoRA, modules to save and all three architectures; merged, disabled and one of two adapters."""
    cases = {}

    def add(name, model, expected=None):
        export_lora(model, tmp_path / name)
        base = model.get_base_model()
        cases[name] = (type(base).__name__, type(base).__name__, *(expected or outputs(model)))

    for base in (
        tiny_clip(),
        tower(CLIPVisionModel, tiny_clip()),
        tower(CLIPVisionModelWithProjection, tiny_clip()),
    ):
        base.save_pretrained(tmp_path / type(base).__name__)
        add(f"plain-{type(base).__name__}", adapted(base))
    add("saved-module", adapted(tiny_clip(), modules_to_save=["visual_projection"]))
    two = adapted(tiny_clip())
    two.add_adapter("second", DualModeLoraConfig(shared_rank=1, residual_rank=2, support_rank=4, text_rank=3))
    two.set_adapter("second")
    add("second", learn(two, 3))
    expected = outputs(two)
    with two.disable_adapter():
        add("disabled", two, expected)
    two.merge_adapter()
    add("merged", two, expected)
    ids = torch.tensor([[97, 1, 2, 98], [97, 3, 98, 98]])
    torch.save((PIXELS, ids, cases), tmp_path / "cases.pt")
    command = [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(READER), str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.split() == [word for name in cases for word in ("equal", name)]


def test_factors_are_ours_bit_for_bit(tiny_clip, tmp_path):
    model = adapted(tiny_clip())
    saved = load_file(export_lora(model, tmp_path) / "adapter_model.safetensors")
    for name, layer in model.dual_mode_layers().items():
        down = torch.cat([layer.dulbe_history_P["default"], layer.dulbe_P["default"]], dim=1)
        current = [layer.dulbe_shared_B["default"], layer.dulbe_residual_B["default"]]
        up = torch.cat([layer.dulbe_history_B["default"], *current], dim=1)
        assert torch.equal(saved[f"base_model.model.{name}.lora_A.weight"], down.T)
        assert torch.equal(saved[f"base_model.model.{name}.lora_B.weight"], up)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]


def test_patterns_reach_only_their_own_layer(tmp_path):
    """Twelve blocks: PEFT shortens long target lists, and layer 1 is a prefix of layers 10 and 11."""
    from transformers import CLIPConfig, CLIPModel

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 12, "num_attention_heads": 2}
    text = {**size, "vocab_size": 99, "bos_token_id": 97, "eos_token_id": 98, "pad_token_id": 98}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config={**size, "image_size": 16, "patch_size": 8})).eval()
    pristine = CLIPModel(clip.config).eval()
    pristine.load_state_dict(clip.state_dict())
    model = adapted(clip, text_rank=3)
    export_lora(model, tmp_path)
    stock = PeftModel.from_pretrained(pristine, str(tmp_path))
    for found, expected in zip(outputs(stock), outputs(model), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_compression_is_the_best_approximation_and_reports_its_error(tiny_clip, tmp_path):
    """Against a full float64 SVD of every update; ranks that are low enough stay as they are, bit for bit."""
    model = learn(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG, text_rank=3)), 3)
    exact = load_file(export_lora(model, tmp_path / "exact") / "adapter_model.safetensors")
    short = load_file(export_lora(model, tmp_path / "short", compress_to=4) / "adapter_model.safetensors")
    report = json.loads((tmp_path / "short" / "compression.json").read_text())
    lost = total = 0.0
    for name, row in report["layers"].items():
        down, up = (f"base_model.model.{name}.lora_{side}.weight" for side in "AB")
        scale = 1.0 if name.startswith("vision_model") else 1 / 3
        whole = scale * exact[up].double() @ exact[down].double()
        u, s, vh = torch.linalg.svd(whole, full_matrices=False)
        best = (u[:, :4] * s[:4]) @ vh[:4]
        found = scale * short[up].double() @ short[down].double()
        torch.testing.assert_close(found, best, atol=1e-6, rtol=0)
        error = ((whole - best).norm() / whole.norm()).item()
        assert row["relative_error"] == pytest.approx(error, abs=1e-7)
        assert ((whole - found).norm() / whole.norm()).item() == pytest.approx(error, abs=1e-6)
        if name.startswith("vision_model"):
            assert (row["rank_before"], row["rank"]) == (9, 4) and error > 0.1
        else:
            assert (row["rank_before"], row["rank"], row["relative_error"]) == (3, 3, 0.0)
            assert torch.equal(short[up], exact[up]) and torch.equal(short[down], exact[down])
        lost, total = lost + (whole - best).norm().item() ** 2, total + whole.norm().item() ** 2
    assert report["rank"] == 4 and report["relative_error"] == pytest.approx((lost / total) ** 0.5, abs=1e-7)
    assert len(report["layers"]) == 16


def test_compression_keeps_the_text_scale_and_whole_updates(tiny_clip, tmp_path):
    model = adapted(tiny_clip())
    expected = outputs(model)
    export_lora(model, tmp_path / "short", compress_to=6)
    stock = PeftModel.from_pretrained(tiny_clip(), str(tmp_path / "short"))
    torch.testing.assert_close(outputs(stock)[0], expected[0], atol=2e-6, rtol=0)  # 3 + 3: nothing is left out
    text = [layer for name, layer in stock.named_modules() if hasattr(layer, "scaling") and "text_model" in name]
    assert {layer.r["default"] for layer in text} == {6} and {layer.scaling["default"] for layer in text} == {1 / 8}


def test_an_exact_export_over_a_compressed_one_leaves_no_report(tiny_clip, tmp_path):
    model = adapted(tiny_clip())
    assert (export_lora(model, tmp_path, compress_to=1) / "compression.json").is_file()
    assert not (export_lora(model, tmp_path) / "compression.json").exists()


@pytest.mark.parametrize(
    ("compress_to", "error", "words"),
    [(0, ValueError, "at least 1, got 0"), (1.5, TypeError, "1.5"), (True, TypeError, "True")],
)
def test_bad_ranks_are_refused_and_nothing_is_written(tiny_clip, tmp_path, compress_to, error, words):
    with pytest.raises(error, match=words):
        export_lora(get_peft_model(tiny_clip(), DualModeLoraConfig(**CONFIG)), tmp_path / "lora", compress_to)
    assert not (tmp_path / "lora").exists()


def test_an_update_that_is_not_finite_is_not_compressed(tiny_clip, tmp_path):
    model = adapted(tiny_clip())
    next(model.residual_parameters()).data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"vision_model.*NaN or infinity"):
        export_lora(model, tmp_path / "lora", compress_to=2)
    assert not (tmp_path / "lora").exists()
