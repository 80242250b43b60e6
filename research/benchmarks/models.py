"""Models and images for the benchmarks: random or saved CLIP models, and noise or photographs."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPVisionModelWithProjection

from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_clip, load_processor, pixel_values
from dulbe_peft.encoders.registry import demo_model_folder

# Vision tower: width, MLP width, blocks, heads, image size, patch size. Text tower: the first four. Feature dimension.
SIZES = {
    "vit-b-16": ((768, 3072, 12, 12, 224, 16), (512, 2048, 12, 8), 512),
    "vit-l-14": ((1024, 4096, 24, 16, 224, 14), (768, 3072, 12, 12), 768),
    "vit-b-32": ((768, 3072, 12, 12, 224, 32), (512, 2048, 12, 8), 512),
    "small": ((192, 768, 8, 3, 64, 8), (128, 512, 4, 4), 192),
    "wide": ((48, 96, 2, 2, 16, 8), (32, 64, 2, 2), 512),  # cheap, with features as wide as those of a large model
    "tiny": ((48, 96, 3, 2, 16, 8), (32, 64, 2, 2), 16),  # three blocks: DualPrompt has general prompts in two
}
LOGIT_SCALE = 100.0


def config(name: str) -> CLIPConfig:
    """Return the configuration of a size, with the vocabulary of the packaged tokenizer."""
    vision, text, dim = SIZES[name]
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    special = {"vocab_size": 667, "bos_token_id": 665, "eos_token_id": 666, "pad_token_id": 666}
    return CLIPConfig(
        vision_config={**dict(zip(keys, vision)), "projection_dim": dim},
        text_config={**dict(zip(keys, text)), **special, "projection_dim": dim},
        projection_dim=dim,
        logit_scale_init_value=4.6052,
    )


def clip(name: str, attention: str) -> tuple[CLIPModel, Any]:
    """Return a CLIP model in evaluation mode, with the same weights in every call, and its processor."""
    if name not in SIZES:
        return load_clip(name, attn_implementation=attention)
    torch.manual_seed(0)
    model = CLIPModel._from_config(config(name), attn_implementation=attention).eval()
    processor = load_processor(str(demo_model_folder()), model)
    processor.image_processor = image_processor(model.config.vision_config.image_size)
    return model, processor


def vision_tower(name: str, attention: str) -> CLIPVisionModelWithProjection:
    """Return a vision tower in evaluation mode, with the same weights in every call."""
    if name not in SIZES:
        tower = CLIPVisionModelWithProjection.from_pretrained(name, dtype=torch.float32, attn_implementation=attention)
        return tower.eval()
    torch.manual_seed(0)
    return CLIPVisionModelWithProjection._from_config(config(name).vision_config, attn_implementation=attention).eval()


def encode(tower: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return unit features of a vision tower, (batch, d)."""
    return F.normalize(tower(pixel_values=pixels).image_embeds, dim=-1)


def pixels(count: int, size: int, images: str | None = None) -> torch.Tensor:
    """Return pixel values (count, 3, size, size) of images of a data set, or of noise that is smooth like photographs.

    Args:
        images: a folder of class folders, or another data set for `dulbe-peft run --data`; None for noise.
    """
    if images is None:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(count, 3, max(2, size // 16), max(2, size // 16), generator=generator)
        smooth = F.interpolate(coarse, size=(size, size), mode="bicubic")
        return smooth + 0.2 * torch.randn(count, 3, size, size, generator=generator)
    data = load_data(images, "train")
    step = max(1, len(data) // count)
    processor = type("Processor", (), {"image_processor": image_processor(size)})
    chosen = list(islice(range(0, len(data), step), count))
    return torch.stack([pixel_values(processor, data[index]["image"].convert("RGB")) for index in chosen])


def image_processor(size: int) -> Any:
    """Return CLIP's image processor for images of this height and width in pixels."""
    return CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def unit(rows: int, dim: int, seed: int) -> torch.Tensor:
    """Return random unit vectors, (rows, dim)."""
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)
