"""The CLIP model underneath: loading it with its processor, and unit features from it.

Nothing here knows of adapters. Images go through the processor that belongs to the model; where a model folder carries
none, CLIP's evaluation transform at the model's image size is used (short side to size, bicubic, centre crop).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer, CLIPModel, CLIPProcessor

try:  # transformers >= 5.6 keeps a PIL backend apart; before that CLIPImageProcessor itself needs no torchvision
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil as PilImageProcessor
except ImportError:  # pragma: no cover - older transformers
    from transformers import CLIPImageProcessor as PilImageProcessor  # type: ignore[assignment]

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_clip(
    name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[CLIPModel, CLIPProcessor]:
    """A CLIP model in float32 and its processor, from a folder or the Hub.

    Args:
        name_or_path: folder in the transformers layout, or Hub id.
        revision: Hub revision.
        attn_implementation: transformers' name of the attention kernel. None: "eager" without an accelerator, whose
            backward pass is the faster one on a CPU, else transformers' default.

    Raises:
        FileNotFoundError: `name_or_path` looks like a folder and is none.
        ValueError: what is there is not a CLIP model.
    """
    name = str(name_or_path)
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"model folder {name!r} does not exist")
    if attn_implementation is None and not torch.accelerator.is_available():
        attn_implementation = "eager"
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    if config.model_type != "clip":
        raise ValueError(f"{name!r} holds a model of type {config.model_type!r}, expected 'clip'")
    model = CLIPModel.from_pretrained(
        name, revision=revision or "main", dtype=torch.float32, attn_implementation=attn_implementation
    )
    return model.eval(), load_processor(name, model, revision)


def load_processor(name: str, model: Any, revision: str | None = None) -> CLIPProcessor:
    """The processor of `name`; the image half falls back to CLIP's evaluation transform at the model's image size."""
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    if not Path(name).is_dir() or any((Path(name) / file).is_file() for file in IMAGE_PROCESSOR_FILES):
        image_processor = PilImageProcessor.from_pretrained(name, revision=revision or "main")
    else:
        size = model.config.vision_config.image_size
        image_processor = PilImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    return CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer)


def check_clip_like(model: nn.Module) -> None:
    """Raise a `ValueError` unless `model` encodes images and texts into one space, as a CLIPModel does."""
    for name in ("get_image_features", "get_text_features", "logit_scale"):
        if not hasattr(model, name):
            raise ValueError(f"{type(model).__name__} has no {name}: a CLIPModel, with both towers, is needed here")


def check_processor(processor: Any) -> None:
    """Raise a `TypeError` unless `processor` has an image processor and a tokenizer, as a CLIPProcessor does."""
    for name in ("image_processor", "tokenizer"):
        if not hasattr(processor, name):
            raise TypeError(f"processor must be a CLIPProcessor or like one, got {processor!r:.100} without {name}")


def unit_image_embeds(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Unit image features z, (batch, d) in float32, from pixel values (batch, 3, height, width)."""
    return _unit(model.get_image_features(pixel_values=pixel_values))  # type: ignore[operator]


def unit_text_embeds(model: nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unit text embeddings e, (classes, d) in float32, from token ids, (classes, length)."""
    return _unit(model.get_text_features(**tokens))  # type: ignore[operator]


def _unit(output: Any) -> torch.Tensor:
    features = getattr(output, "pooler_output", output)
    return F.normalize(features.float(), dim=-1)


def tokenize(processor: Any, prompts: Sequence[str], max_length: int) -> dict[str, torch.Tensor]:
    """Token ids, (prompts, longest prompt), padded no further than the longest one.

    No mask goes with them: the text tower is causal and read at the first end token, so padding behind it is not seen.

    Raises:
        ValueError: a prompt needs more than `max_length` tokens, or two prompts give the same tokens.
    """
    rows = processor.tokenizer(list(prompts))["input_ids"]
    seen: dict[tuple[int, ...], str] = {}
    for prompt, ids in zip(prompts, rows, strict=True):
        if len(ids) > max_length:
            raise ValueError(f"prompt {prompt!r} has {len(ids)} tokens, the text tower takes {max_length}: shorten it")
        if tuple(ids) in seen:
            other = seen[tuple(ids)]
            raise ValueError(f"prompts {other!r} and {prompt!r} are the same to the tokenizer: rename a class")
        seen[tuple(ids)] = prompt
    batch = processor.tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    return {"input_ids": batch["input_ids"]}


def pixel_values(processor: Any, image: Any) -> torch.Tensor:
    """One image as the model takes it, (3, height, width) in float32.

    Args:
        image: a PIL image, or a float tensor (3, height, width) that is already preprocessed.

    Raises:
        TypeError: the image is something else; a path or an address is never opened.
        ValueError: the tensor is not floating point or not (3, height, width), or not finite.
    """
    if isinstance(image, torch.Tensor):
        if not image.is_floating_point() or image.ndim != 3 or image.shape[0] != 3:
            raise ValueError(
                f"a tensor image must be preprocessed, float (3, height, width), got {image.dtype} "
                f"{tuple(image.shape)}; pass PIL images to have them preprocessed"
            )
        image = image.float()
        if not torch.isfinite(image).all():
            raise ValueError("a tensor image holds NaN or infinity")
        return image
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"it is {image!r:.100}, a {type(image).__name__}; a PIL image or a preprocessed tensor is needed"
        )
    return processor.image_processor(images=image, return_tensors="pt")["pixel_values"][0]
