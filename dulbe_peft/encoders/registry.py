"""Describe the supported encoders: one record for each `model_type` of transformers.

To support another encoder of the same kind, add a record here; no other code changes.
"""

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dulbe_peft.utils.files import read_json

CLIP_TEXT_TARGETS = r"k_proj|v_proj|fc1|fc2"
BERT_TEXT_TARGETS = r"self\.(key|value)|intermediate\.dense|\d+\.output\.dense"


@dataclass(frozen=True)
class DualEncoder:
    """Facts about one type of encoder."""

    title: str  # the family's name, for messages and model cards
    model: str  # transformers' class of the model
    image_processor: str  # transformers' class of the image processor that needs no torchvision
    processor: str | None = None  # transformers' class of the processor; None if there is only an image processor
    image_processor_names: tuple[str, ...] = ()  # other classes in published files that give the same pixels
    embed_dim: str = "projection_dim"  # entry of the configuration with the width of the features
    image_size: str = "vision_config.image_size"  # entry of the configuration with the height and width of the images
    any_image_size: bool = False  # position embeddings are interpolated, so the image processor decides the size
    patches: bool = False  # images keep their aspect ratio, as a sequence of patches in the layout of `packed`
    cls_token: bool = True  # token 0 of an image is a class token, and the other tokens are patches
    # Name endings of the vision blocks' layers that are adapted by default: keys, values and MLP.
    target_modules: tuple[str, ...] = ("fc1", "fc2", "k_proj", "v_proj")
    # The module that pools the patches; its layers have the names of the blocks' layers.
    pooling_head: str | None = None
    logit_scale: str | None = "logit_scale"  # the parameter that holds log(tau)
    text_tower: str | None = "text_model"  # the module that contains the text tower; None if there is none
    text_targets: str = CLIP_TEXT_TARGETS  # regular expression for the names of the text blocks' layers with LoRA
    padding: str = "longest"  # "max_length" pads to the tower's longest text, because the tower reads the padding too
    padding_side: str | None = "right"  # None: the side that the tokenizer chooses
    attention_mask: bool = False  # the text tower needs a mask of the padding
    offset_positions: bool = False  # the positions of a text begin after the padding token's id, as in RoBERTa
    text_dropout: bool = False  # the text tower has dropout in training mode
    unused_pooler: bool = False  # the model's class adds a pooling layer that no feature uses

    @property
    def image_only(self) -> bool:
        """Whether the encoder has no text tower."""
        return self.text_tower is None


# Facts that several types have in common.
_IMAGE_ONLY: dict[str, Any] = {
    "embed_dim": "hidden_size",
    "image_size": "image_size",
    # The last three are the layers of the gated MLP in DINOv2 giant.
    "target_modules": ("fc1", "fc2", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    "logit_scale": None,
    "text_tower": None,
}
_SIGLIP: dict[str, Any] = {"embed_dim": "vision_config.hidden_size", "cls_token": False, "pooling_head": "head"}
_SIGLIP |= {"padding": "max_length", "padding_side": None}
_WITH_BERT: dict[str, Any] = {"text_targets": BERT_TEXT_TARGETS, "attention_mask": True, "text_dropout": True}

ENCODERS: dict[str, DualEncoder] = {
    "clip": DualEncoder("CLIP", "CLIPModel", "CLIPImageProcessorPil", "CLIPProcessor"),
    # SigLIP 2 checkpoints with a fixed resolution have this type, too.
    "siglip": DualEncoder("SigLIP", "SiglipModel", "SiglipImageProcessorPil", "SiglipProcessor", **_SIGLIP),
    "siglip2": DualEncoder(
        "SigLIP 2 NaFlex",
        "Siglip2Model",
        "Siglip2ImageProcessorPil",
        "Siglip2Processor",
        any_image_size=True,
        patches=True,
        **_SIGLIP,
    ),
    "metaclip_2": DualEncoder("MetaCLIP 2", "MetaClip2Model", "CLIPImageProcessorPil", "CLIPProcessor"),
    "chinese_clip": DualEncoder(
        "Chinese-CLIP", "ChineseCLIPModel", "ChineseCLIPImageProcessorPil", "ChineseCLIPProcessor", **_WITH_BERT
    ),
    "altclip": DualEncoder(
        "AltCLIP", "AltCLIPModel", "CLIPImageProcessorPil", "AltCLIPProcessor", offset_positions=True, **_WITH_BERT
    ),
    "dinov2": DualEncoder("DINOv2", "Dinov2Model", "BitImageProcessorPil", any_image_size=True, **_IMAGE_ONLY),
    "dinov2_with_registers": DualEncoder(
        "DINOv2 with registers", "Dinov2WithRegistersModel", "BitImageProcessorPil", any_image_size=True, **_IMAGE_ONLY
    ),
    "dinov3_vit": DualEncoder(
        "DINOv3",
        "DINOv3ViTModel",
        "ViTImageProcessorPil",
        image_processor_names=("DINOv3ViTImageProcessor",),
        any_image_size=True,
        **_IMAGE_ONLY,
    ),
    "vit": DualEncoder("ViT", "ViTModel", "ViTImageProcessorPil", unused_pooler=True, **_IMAGE_ONLY),
}

# `model_type` of a vision tower that is a model of its own, with or without a projection -> that of the whole encoder.
# An adapter file of either fits both.
VISION_TOWERS = {f"{name}_vision_model": name for name, record in ENCODERS.items() if not record.image_only}


def type_of(model: object) -> Any:
    """Return the `model_type` in a model's configuration, or None if it has none."""
    return getattr(getattr(model, "config", None), "model_type", None)


def find_record(model: object) -> DualEncoder | None:
    """Return the record of a model's type, also for the vision tower of an encoder alone; None for other types."""
    model_type = str(type_of(model))
    return ENCODERS.get(VISION_TOWERS.get(model_type, model_type))


# Why some encoders of transformers are not supported.
_UNSUPPORTED = {
    "timm_wrapper": "timm needs torchvision: use the model's transformers version, such as DINOv2, DINOv3 or ViT",
    "dinov3_convnext": "it has no class token and no linear layers of attention: use a DINOv3 ViT",
}


def unsupported(model_type: object) -> str:
    """Return the part of a message that says why a type is not supported, and which types are."""
    why = f" ({_UNSUPPORTED[str(model_type)]})" if model_type in _UNSUPPORTED else ""
    types = ", ".join(f"{name!r} ({record.title})" for name, record in ENCODERS.items())
    return f"of type {model_type!r}, which is not supported{why}; the supported types are {types}"


def demo_model_folder() -> Path:
    """Return the folder of the small CLIP that comes with the package."""
    return Path(str(resources.files("dulbe_peft") / "assets" / "demo_clip"))


def find_model(name_or_path: str | os.PathLike[str], revision: str | None = None) -> tuple[str, DualEncoder]:
    """Return the folder or Hub id of a model, and the record of its type, without importing a slow package."""
    from dulbe_peft.utils.folders import put_back

    name = str(name_or_path)
    if name == "demo" and not Path(name).exists():
        name = str(demo_model_folder())
    put_back(Path(name))
    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise FileNotFoundError(f"model folder {name!r} does not exist")
    if Path(name).is_file():
        raise ValueError(f"{name!r} is a file, expected a model's folder or its id on the Hub")
    folder = Path(name)
    if not folder.is_dir():
        from dulbe_peft.utils import hub

        folder, _ = hub.fetch(name, ["config.json"], revision)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name!r} contains no model: it has no config.json")
    config = read_json(folder / "config.json")
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in ENCODERS:
        raise ValueError(f"{name!r} contains a model {unsupported(model_type)}")
    return name, ENCODERS[model_type]
