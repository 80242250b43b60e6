"""The tiny CLIP with an adapter: its features of three images and two texts, and tasks with random modes."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dulbe_peft import ModeBases

CONFIG = {"shared_rank": 1, "residual_rank": 2, "support_rank": 4}
PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([[97, 1, 2, 98], [97, 3, 98, 98]])


def forget_digest(folder):
    """Write a saved adapter's tensors again without metadata, so that only the other checks can find changes."""
    file = Path(folder) / "adapter_model.safetensors"
    save_file(load_file(file), file)


@torch.no_grad()
def image_features(model):
    return model.get_image_features(pixel_values=PIXELS.to(model.dtype)).pooler_output


@torch.no_grad()
def text_features(model):
    return model.get_text_features(input_ids=IDS).pooler_output


def outputs(model):
    return image_features(model), text_features(model)


def random_modes(model):
    modes = {}
    for name, layer in model.dual_mode_layers().items():
        ranks = model.active_config.ranks_of(name)
        basis = torch.linalg.qr(torch.randn(layer.in_features, sum(ranks)))[0]
        modes[name] = ModeBases(*basis.split(ranks, dim=1))
    return modes


def shallow(clip):
    """Leave one block in each tower, where what is tested is the same in every block, and return the model."""
    for tower in (clip.vision_model, clip.text_model):
        tower.encoder.layers = tower.encoder.layers[:1]
        tower.config.num_hidden_layers = 1
    return clip


def randomise(parameters, scale=0.1):
    for parameter in parameters:
        parameter.data.normal_(std=scale)


def learned(model, tasks=2):
    """Take the model through tasks with random parameters, of which the last is not folded yet, and return it."""
    for _ in range(tasks):
        model.begin_task(random_modes(model))
        randomise(p for p in model.parameters() if p.requires_grad)
    return model.eval()
