"""Test the counts against the paper's overhead tables and against the tensors of real models."""

import pytest
import torch
from documents import text_of
from peft import get_peft_model

from dulbe_peft import DualModeLoraConfig, OccupationStatistics, collect_statistics
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.photos.cost import shared_inputs, statistics_bytes, trainable_parameters
from dulbe_peft.strategies import make_strategy
from research.benchmarks import family


def test_counts_equal_the_overheads_in_the_paper():
    """Compare with the tables of trained parameters, memory (101.20 MiB include a map of 1 MiB) and statistics."""
    counted = {row["what"].removesuffix(", ViT-B/16"): row["value"] for row in family.overhead_rows()}
    assert counted["trained in the vision tower, r = 1"] == 12 * (768 + 768 + 3072 + 768) == 64_512
    assert counted["trained in the vision tower, r = 1 + 8"] == 580_608
    text = 12 * 8 * 2 * ((512 + 512) + (512 + 2048))
    assert counted["trained in all, r = 1"] == 64_512 + text == pytest.approx(0.75e6, rel=5e-3)
    assert counted["trained in all, r = 1 + 8"] == 580_608 + text == pytest.approx(1.27e6, rel=5e-3)
    stored = [size for what, size in counted.items() if what.startswith("occupation statistics")]
    assert stored == [486, 27, 9, 2.25]
    depths, counts_and_lengths = 4 * 10, 2 * 8 * 100
    bridge = counted["bridge: kept of 100 classes beside their texts"]
    assert bridge * 2**20 == 4 * (100 * 512 + 100 * 10) + depths + counts_and_lengths and round(bridge, 2) == 0.20
    gaussians = counted["rapf: kept of 100 classes beside their texts"]
    assert gaussians == pytest.approx(101.2, rel=1e-3)
    assert f"share one matrix: {stored[0]:g} MiB\n" in text_of("docs/decisions.md")


def test_counts_equal_the_sizes_of_real_tensors(tiny_clip):
    """Compare with the parameters and the statistics of a model that has encoded an image."""
    model = get_peft_model(tiny_clip(), DualModeLoraConfig(residual_rank=2, support_rank=5))
    image, into = torch.randn(1, 3, 16, 16), OccupationStatistics()
    collect_statistics(model, [image], lambda m, batch: unit_image_embeds(m.get_base_model(), batch), into=into)
    assert statistics_bytes(model) == into.nbytes and set(shared_inputs(model)) == set(into.groups)
    trained = trainable_parameters(model, make_strategy("dulbe"))
    assert trained["total"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    bases = sum(layer.dulbe_P["default"].numel() for layer in model.dual_mode_layers().values())
    assert trainable_parameters(model, make_strategy("lora"))["bases"] == bases and trained["bases"] == 0
