"""Costs against counts written out by hand, against real tensors, and against the paper's overhead tables."""

import json
from pathlib import Path

import pytest
import tiny_encoders as tiny
import torch
from peft import get_peft_model
from transformers import CLIPConfig

from dulbe_peft import DualModeLoraConfig, OccupationStatistics, collect_statistics
from dulbe_peft.classifiers import make_classifiers
from dulbe_peft.commands.main import main
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.encoders.loading import embed_dim, empty_encoder, unit_image_embeds
from dulbe_peft.encoders.registry import ENCODERS
from dulbe_peft.metrics.cost import cost, kept_parameters, shared_inputs, statistics_bytes
from dulbe_peft.strategies import make_strategy

DULBE, FROZEN = make_strategy("dulbe"), make_strategy("frozen")
MIB = 2**20


@pytest.fixture(scope="module")
def vit_b_16(tmp_path_factory):
    """A folder with nothing but the configuration of CLIP's ViT-B/16."""
    folder = tmp_path_factory.mktemp("vit-b-16")
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    CLIPConfig(vision_config={**vision, "patch_size": 16}, projection_dim=512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(vit_b_16):
    """What DuLBE on ViT-B/16 costs with a hundred classes."""
    model = get_peft_model(empty_encoder(vit_b_16), DualModeLoraConfig())
    return cost(model, DULBE, make_classifiers(("bridge", "rapf", "text"), embed_dim(model.get_base_model())), 100)


def test_the_paper_s_overheads(whole):
    """0.0645M and 0.5806M parameters in the vision tower, 0.75M and 1.27M in all; the bridge keeps |C| d + |C| K_b
    numbers, 0.20 MiB, and RAPF's Gaussians take 100.20 MiB.
    """
    trained, kept = whole["trainable"], whole["classifiers"]
    assert trained["shared"] == 12 * (768 + 768 + 3072 + 768) == 64_512
    assert trained["shared"] + trained["residual"] == 580_608
    assert trained["other"] == 12 * 8 * 2 * ((512 + 512) + (512 + 2048)) == 688_128
    assert trained["total"] == pytest.approx(1.27e6, rel=5e-3)
    assert trained["shared"] + trained["other"] == pytest.approx(0.75e6, rel=5e-3)
    bridge = kept["bridge"]["without_texts"]
    assert bridge == 4 * (100 * 512 + 100 * 10 + 10) + 2 * 8 * 100  # depths, counts and lengths too
    assert kept["bridge"]["total"] - bridge == 4 * 100 * 512 and round(bridge / MIB, 2) == 0.20
    assert kept["rapf"]["without_texts"] == pytest.approx(101.2 * MIB, rel=1e-3)  # the map is 1 MiB
    assert kept["text"]["without_texts"] == 0


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, 486.0),
        ({"target_modules": ["k_proj", "v_proj"]}, 27.0),
        ({"target_modules": ["k_proj", "v_proj"], "layers_to_transform": [8, 9, 10, 11]}, 9.0),
        ({"target_modules": ["visual_projection"]}, 2.25),
    ],
)
def test_the_papers_statistics(vit_b_16, config, expected):
    """Table "Statistic storage": the full configuration and the variants A, B and C."""
    model = get_peft_model(empty_encoder(vit_b_16), DualModeLoraConfig(**config))
    assert statistics_bytes(shared_inputs(model).values(), 128)["exact"] == expected * MIB


def test_multiply_adds_of_one_image_by_hand(whole):
    """Every product of the tower; the paper takes 17.60 for the same by a convention."""
    tokens, width, inner, layers = 197, 768, 3072, 12
    block = tokens * (4 * width**2 + 2 * width * inner) + 2 * tokens**2 * width
    image = 196 * (3 * 16 * 16) * width + layers * block + width * 512
    assert whole["multiply_adds"]["image"] == image == pytest.approx(17.60e9, rel=3e-3)
    adapter = layers * tokens * 9 * (3 * width + inner + 3 * width + inner)
    assert whole["multiply_adds_unmerged"]["image"] == image + adapter
    text = 77 * (4 * 512**2 + 2 * 512 * 2048) + 2 * 77**2 * 512
    assert whole["multiply_adds"]["text"] == 12 * text + 512 * 512
    lora = 12 * 77 * 8 * 2 * ((512 + 512) + (512 + 2048))
    assert whole["multiply_adds_unmerged"]["text"] == whole["multiply_adds"]["text"] + lora


def test_counts_are_those_of_real_tensors(tiny_clip):
    """Parameters, history and statistics of a model with weights that has seen an image."""
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(residual_rank=2, support_rank=5, history_rank=9))
    found = cost(model, DULBE, {}, tasks=3)
    image = torch.randn(1, 3, 16, 16)
    for rows, form in ((None, "exact"), (10, "sketch")):
        into = OccupationStatistics(rows)
        collect_statistics(model, [image], lambda m, batch: unit_image_embeds(m.get_base_model(), batch), into=into)
        assert found["statistics"][form] == into.nbytes
    assert set(shared_inputs(model)) == set(into.groups)
    assert found["trainable"]["total"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    history = [buffer for name, buffer in model.named_buffers() if "dulbe_history_" in name]
    assert found["kept"]["history"] == sum(buffer.numel() for buffer in history) > 0
    assert kept_parameters(model, make_strategy("lora"), 3)["history"] == found["kept"]["history"] // 3
    bases = sum(layer.dulbe_P["default"].numel() for layer in model.dual_mode_layers().values())
    assert cost(model, make_strategy("lora"), {})["trainable"]["bases"] == bases
    assert statistics_bytes([4, 30], 5) == {"exact": 4 * (16 + 900), "sketch": 4 * (16 + 300)}


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_every_encoder_is_counted_without_its_weights(model_type, tmp_path):
    made = tiny.make_model(model_type)
    made.config.save_pretrained(tmp_path)
    empty = empty_encoder(tmp_path)
    assert all(p.device.type == "meta" for p in empty.parameters())
    found = cost(empty, FROZEN, {})
    assert found["model"] == sum(p.numel() for p in made.parameters())
    adapted = cost(get_peft_model(empty, DualModeLoraConfig(residual_rank=2)), DULBE, {})
    assert adapted["multiply_adds"] == found["multiply_adds"]
    assert adapted["multiply_adds_unmerged"]["image"] > found["multiply_adds"]["image"]
    assert adapted["layers"] >= 8


def test_the_command(vit_b_16, tmp_path, capsys):
    protocol, out = Path(__file__).parents[1] / "examples" / "protocols" / "a-cub200.yaml", tmp_path / "cost.json"
    assert main(["cost", "--config", str(protocol), "--model", str(vit_b_16), "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "trainable parameters in a task: 1,268,736 (64,512 shared, 516,096 residual, 688,128 other)" in said
    assert "17.5635 for one image" in said and "486.00 MiB, as sketches 54.00 MiB" in said
    assert "classifiers with 200 classes" in said and json.loads(out.read_text(encoding="utf-8"))["classes"] == 200
    assert main(["cost", "--model", str(vit_b_16), "--classifiers", "slca,text", "--classes", "3000"]) == 0
    assert "slca trains on all classes in every task: 25,606 billions here\n" in capsys.readouterr().out
    assert main(["cost", "--model", str(demo_model_folder()), "--strategy", "frozen", "--json", "-"]) == 0
    assert "trainable" not in json.loads(capsys.readouterr().out)
