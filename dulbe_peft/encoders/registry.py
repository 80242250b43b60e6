"""The served encoders: one record of facts for each `model_type` of transformers.

A record holds names and numbers only. `loading` reads it to load, tokenize and encode; the adapter reads it to find
the blocks. Another encoder of the same kind needs another record here, and no code elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CLIP_TEXT_TARGETS = r"k_proj|v_proj|fc1|fc2"
BERT_TEXT_TARGETS = r"self\.(key|value)|intermediate\.dense|\d+\.output\.dense"


@dataclass(frozen=True)
class DualEncoder:
    """What is particular to one type of encoder.

    Attributes:
        title: name of the family, for messages and model cards.
        model: transformers' class of the model.
        image_processor: transformers' class of the image processor, the one that needs no torchvision.
        processor: transformers' class of the processor. None: the image processor is all there is.
        embed_dim: where the configuration holds the width of the features.
        image_size: where the configuration holds the height and width of the images.
        any_image_size: the position embeddings are interpolated, so the image processor decides the size.
        cls_token: token 0 of an image is a class token, and the other ones are patches.
        target_modules: name endings of the vision blocks' layers that are adapted by default: keys, values and MLP.
        pooling_head: name of the module that pools the patches and has layers called like those of the blocks.
        logit_scale: the parameter that holds log(tau). None: there is none.
        text_tower: the module in which the text tower begins. None: there is none.
        text_targets: expression for the name endings of the text blocks' layers with LoRA: keys, values and MLP.
        padding: "longest": texts are padded to the longest of their batch. "max_length": texts are always padded to
            the longest text that the tower takes, because the tower reads the padding too.
        padding_side: "right", or None for the side that the tokenizer chooses.
        attention_mask: the text tower needs the mask of the padding.
        offset_positions: the positions of a text begin after the padding token's id, as in RoBERTa.
        text_dropout: the text tower drops activations in training mode.
        unused_pooler: the model's class adds a pooling layer, which no feature needs and many checkpoints lack.
    """

    title: str
    model: str
    image_processor: str
    processor: str | None = None
    embed_dim: str = "projection_dim"
    image_size: str = "vision_config.image_size"
    any_image_size: bool = False
    cls_token: bool = True
    target_modules: tuple[str, ...] = ("fc1", "fc2", "k_proj", "v_proj")
    pooling_head: str | None = None
    logit_scale: str | None = "logit_scale"
    text_tower: str | None = "text_model"
    text_targets: str = CLIP_TEXT_TARGETS
    padding: str = "longest"
    padding_side: str | None = "right"
    attention_mask: bool = False
    offset_positions: bool = False
    text_dropout: bool = False
    unused_pooler: bool = False

    @property
    def image_only(self) -> bool:
        """The encoder has no text tower."""
        return self.text_tower is None


def _image_only(title: str, model: str, image_processor: str, **facts: Any) -> DualEncoder:
    return DualEncoder(
        title=title,
        model=model,
        image_processor=image_processor,
        embed_dim="hidden_size",
        image_size="image_size",
        # The last three are the layers of DINOv2 giant's gated MLP.
        target_modules=("fc1", "fc2", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
        logit_scale=None,
        text_tower=None,
        **facts,
    )


_LIKE_BERT: dict[str, Any] = {"text_targets": BERT_TEXT_TARGETS, "attention_mask": True, "text_dropout": True}
ENCODERS: dict[str, DualEncoder] = {
    "clip": DualEncoder(
        title="CLIP", model="CLIPModel", processor="CLIPProcessor", image_processor="CLIPImageProcessorPil"
    ),
    # The checkpoints of SigLIP 2 with a fixed resolution are of this type too.
    "siglip": DualEncoder(
        title="SigLIP",
        model="SiglipModel",
        processor="SiglipProcessor",
        image_processor="SiglipImageProcessorPil",
        embed_dim="vision_config.hidden_size",
        cls_token=False,
        pooling_head="head",
        padding="max_length",
        padding_side=None,
    ),
    "metaclip_2": DualEncoder(
        title="MetaCLIP 2", model="MetaClip2Model", processor="CLIPProcessor", image_processor="CLIPImageProcessorPil"
    ),
    "chinese_clip": DualEncoder(
        title="Chinese-CLIP",
        model="ChineseCLIPModel",
        processor="ChineseCLIPProcessor",
        image_processor="ChineseCLIPImageProcessorPil",
        **_LIKE_BERT,
    ),
    "altclip": DualEncoder(
        title="AltCLIP",
        model="AltCLIPModel",
        processor="AltCLIPProcessor",
        image_processor="CLIPImageProcessorPil",
        offset_positions=True,
        **_LIKE_BERT,
    ),
    "dinov2": _image_only("DINOv2", "Dinov2Model", "BitImageProcessorPil", any_image_size=True),
    "dinov2_with_registers": _image_only(
        "DINOv2 with registers", "Dinov2WithRegistersModel", "BitImageProcessorPil", any_image_size=True
    ),
    "vit": _image_only("ViT", "ViTModel", "ViTImageProcessorPil", unused_pooler=True),
}

# CLIP's vision towers that stand alone; the adapter files of both fit a CLIPModel.
CLIP_VISION_TYPES = ("clip_vision_model", "clip_vision_model_with_projection")


def type_of(model: object) -> Any:
    """The `model_type` in a model's configuration; None where it has none."""
    return getattr(getattr(model, "config", None), "model_type", None)


def find_record(model: object) -> DualEncoder | None:
    """The record of a model's type, also for CLIP's vision towers that stand alone; None for other types."""
    model_type = type_of(model)
    return ENCODERS.get("clip" if model_type in CLIP_VISION_TYPES else str(model_type))


def served() -> str:
    """The served types with their families, for messages."""
    return ", ".join(f"{model_type!r} ({record.title})" for model_type, record in ENCODERS.items())
