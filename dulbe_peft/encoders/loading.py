"""Load an encoder and its processor, check them, and compute unit features. `registry` describes each encoder.

For SigLIP 2 NaFlex, images of any aspect ratio are packed into one tensor each. A row of the tensor holds one patch
and, in two more columns, the height and width of the image's grid of patches. Padding rows come last.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import normalizers
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, CLIPModel, CLIPProcessor, PreTrainedModel

from dulbe_peft.encoders.registry import ENCODERS, DualEncoder, find_model, type_of, unsupported
from dulbe_peft.utils.files import plain_reason
from dulbe_peft.utils.tensors import unmap_weights
from dulbe_peft.utils.torch_settings import evaluating

IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageOnlyProcessor:
    """Processor of an encoder without a text tower: an image processor, and no tokenizer."""

    image_processor: Any

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        self.image_processor.save_pretrained(folder)


def load_dual_encoder(
    name_or_path: str | os.PathLike[str], revision: str | None = None, attn_implementation: str | None = None
) -> tuple[Any, Any]:
    """Load an encoder in float32 and evaluation mode, and its processor, from a folder or the Hub.

    The supported encoders are CLIP, SigLIP, SigLIP 2, MetaCLIP 2, Chinese-CLIP and AltCLIP, and the image-only
    encoders DINOv2, DINOv3 and ViT.

    Args:
        name_or_path: Folder in the transformers layout, or Hub id. "demo" is the tiny CLIP of this package.
        revision: Hub revision.
        attn_implementation: Attention implementation, as transformers names it. None chooses "eager" on a CPU, where
            it is faster, and transformers' default elsewhere.

    Returns:
        The model and its processor.

    Raises:
        FileNotFoundError: If `name_or_path` looks like a folder but does not exist.
        ValueError: If the type of the model is not supported. The message lists the supported types.
    """
    name, record = find_model(name_or_path, revision)
    model = load_encoder(name, record, revision, attn_implementation)
    return model, load_processor(name, model, revision)


def load_encoder(name: str, record: DualEncoder, revision: str | None, attn_implementation: str | None) -> Any:
    """Load what `find_model` found as `load_dual_encoder` does, but without a processor."""
    if attn_implementation is None and not torch.accelerator.is_available():
        attn_implementation = "eager"
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_no_load_report)
    try:
        model, found = getattr(transformers, record.model).from_pretrained(
            name,
            revision=revision or "main",
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_complete` says which weight it is
            **({"add_pooling_layer": False} if record.unused_pooler else {}),
        )
    except Exception as error:  # a changed configuration can raise anything
        if isinstance(error, (OSError, ImportError, MemoryError)) or "memory" in str(error):
            raise
        reason = " ".join(plain_reason(error).split())
        raise ValueError(f"the model in {name!r} cannot be loaded: {type(error).__name__}: {reason:.300}") from error
    finally:
        log.removeFilter(_no_load_report)
    _check_complete(name, found)
    unmap_weights(model)
    return model.eval()


def _no_load_report(record: logging.LogRecord) -> bool:
    """Return False for transformers' report on weights that are left over or missing: `_check_complete` reads them."""
    return "LOAD REPORT" not in record.getMessage()


def _check_complete(name: str, found: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if weights do not fit the model's config.json: transformers would draw missing ones."""
    reason = ""
    for key, stored, needed in sorted(found["mismatched_keys"])[:1]:
        reason = f"{key!r} has the shape {tuple(stored)} in the file and {tuple(needed)} by config.json"
    missing = sorted(key for key in found["missing_keys"] if not key.endswith("mask_token"))
    if missing and not reason:
        reason = f"the file lacks {missing[0]!r} and {len(missing) - 1} more"
    blocks = sorted(key for key in found["unexpected_keys"] if any(part.isdigit() for part in key.split(".")))
    if blocks and not reason:  # a head for another purpose, in no block, may be left over
        reason = f"the file has {blocks[0]!r}, which config.json does not provide for"
    if reason:
        raise ValueError(
            f"the weights in {name!r} do not fit its config.json, perhaps because it was edited: {reason}"
        )


def load_clip(
    name_or_path: str | os.PathLike[str], revision: str | None = None, attn_implementation: str | None = None
) -> tuple[CLIPModel, CLIPProcessor]:
    """Load a CLIP model and its processor as [`load_dual_encoder`] does, and raise a `ValueError` for another type."""
    name, record = find_model(name_or_path, revision)
    if record is not ENCODERS["clip"]:
        raise ValueError(
            f"{name!r} contains a {record.model}, expected a CLIPModel; load_dual_encoder loads other types"
        )
    return load_dual_encoder(name, revision, attn_implementation)


def load_processor(name: str, model: PreTrainedModel, revision: str | None = None) -> Any:
    """Load the processor in `name`.

    For a folder without an image processor, return the default one of the encoder's family at the model's image size.
    """
    record = encoder_of(model)
    kind = getattr(transformers, record.image_processor)
    if not Path(name).is_dir() or any((Path(name) / file).is_file() for file in IMAGE_PROCESSOR_FILES):
        settings, _ = kind.get_image_processor_dict(name, revision=revision or "main")
        _check_kind(name, settings, record)
        image_processor = kind.from_dict(settings)
    else:
        image_processor = _default_image_processor(kind, model)
    if record.processor is None:
        return ImageOnlyProcessor(image_processor)
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers returns one if it cannot find the files
        raise OSError(f"the tokenizer in {name} has no vocabulary: its files cannot be read")
    if record.padding == "max_length":  # SigLIP and SigLIP 2 were trained without a mask, on lower-case texts
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "attention_mask"]
        if type(tokenizer).__name__ == "GemmaTokenizer":  # of SigLIP 2; SigLIP's tokenizer lowers the case itself
            backend = tokenizer.backend_tokenizer
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), backend.normalizer])
    return getattr(transformers, record.processor)(image_processor=image_processor, tokenizer=tokenizer)


def _check_kind(name: str, settings: dict[str, object], record: DualEncoder) -> None:
    """Raise a `ValueError` if a folder names an image processor that gives different pixels from the family's."""
    named = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    family = {_family_name(kind) for kind in (record.image_processor, *record.image_processor_names)}
    if named and _family_name(named) not in family:
        raise ValueError(
            f"{name} has the image processor {named!r}, but {record.title} needs {record.image_processor}, "
            f"which gives different pixels: use a model with {' or '.join(sorted(family))}"
        )


def _family_name(kind: str) -> str:
    """Return the name of an image processor without its backend, and in the form used since transformers 4.26."""
    return kind.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")


def _default_image_processor(kind: Any, model: PreTrainedModel) -> Any:
    if encoder_of(model).patches:
        vision = model.config.vision_config
        return kind(patch_size=vision.patch_size, max_num_patches=vision.num_patches)
    size = image_shape(model)[-1]
    square = {"height": size, "width": size}
    crops = "shortest_edge" in kind.size
    return kind(size={"shortest_edge": size}, crop_size=square) if crops else kind(size=square)


def encoder_of(model: object) -> DualEncoder:
    """Return the record of the model's type, or raise a `ValueError` if the type is not supported."""
    model_type = type_of(model)
    if model_type not in ENCODERS:
        raise ValueError(f"{type(model).__name__} is {unsupported(model_type)}")
    return ENCODERS[model_type]


def check_encoder(model: nn.Module, text: bool = False) -> None:
    """Raise a `ValueError` unless `model` is a complete encoder of a supported type, with a text tower if `text`."""
    record = encoder_of(model)
    if not isinstance(model, getattr(transformers, record.model)):
        raise ValueError(f"{type(model).__name__} is not the complete {record.title} encoder: pass a {record.model}")
    if text and record.image_only:
        with_text = ", ".join(f"{name!r}" for name, other in ENCODERS.items() if not other.image_only)
        raise ValueError(
            f"{type(model).__name__} has no text tower, but texts are needed here: use a model of type {with_text}, "
            "or a strategy and classifiers that need no text"
        )


def has_text(model: object) -> bool:
    """Return whether the model has a text tower."""
    return not encoder_of(model).image_only


def check_processor(processor: object, model: object) -> None:
    """Raise a `TypeError` unless `processor` has the image processor, and the tokenizer, that the model needs."""
    kind = encoder_of(model).processor or ImageOnlyProcessor.__name__
    for name in ("image_processor", "tokenizer") if has_text(model) else ("image_processor",):
        if not hasattr(processor, name):
            raise TypeError(f"processor must be a {kind} or similar, got {processor!r:.100} without {name}")


def unsaved_part(processor: Any, model: PreTrainedModel) -> str:
    """Return a message about the part of the processor that a saved learner would lose, or "" if it loses nothing."""
    expected, given = encoder_of(model).image_processor, type(processor.image_processor)
    if given is not getattr(transformers, expected):
        return f"the image processor is a {given.__name__}, but a saved learner is loaded with a {expected}"
    tokenizer = type(processor.tokenizer) if has_text(model) else None
    if tokenizer is not None and tokenizer.__module__.partition(".")[0] != transformers.__name__:
        return f"the tokenizer is a {tokenizer.__name__}, but a saved learner is loaded with one of transformers'"
    return ""


def check_saved(processor: object, model: PreTrainedModel) -> None:
    """Raise a `ValueError` if a learner, once saved and loaded, would read images or texts with another processor."""
    if lost := unsaved_part(processor, model):
        raise ValueError(f"{lost}: use the processor that load_dual_encoder returns, and change its settings")


def check_statistics_tokens(model: object, tokens: str) -> None:
    """Raise a `ValueError` if `tokens` selects or excludes the class token of a model that has none."""
    if tokens != "all" and not encoder_of(model).cls_token:
        kind = type(model).__name__
        raise ValueError(f"statistics_tokens is {tokens!r}, but a {kind} has no class token: choose 'all'")


def embed_dim(model: PreTrainedModel) -> int:
    """Return the width d of the features, which is the same for images and texts."""
    return int(attrgetter(encoder_of(model).embed_dim)(model.config))


def logit_scale(model: object) -> float:
    """Return tau, the factor of the cosines (not its logarithm); 1.0 for an image-only model, which has none."""
    name = encoder_of(model).logit_scale
    return 1.0 if name is None else math.exp(float(getattr(model, name).detach()))


def image_shape(model: PreTrainedModel, processor: object = None) -> tuple[int, ...]:
    """Return the shape of an image: (3, height, width), or that of `packed`.

    If the model accepts images of any size, `processor` determines the size.
    """
    record = encoder_of(model)
    if record.any_image_size and processor is not None:
        return tuple(pixel_values(processor, Image.new("RGB", (256, 256))).shape)
    if record.patches:
        vision = model.config.vision_config
        return vision.num_patches, vision.num_channels * vision.patch_size**2 + 2
    size = attrgetter(record.image_size)(model.config)
    side = int(size[0] if isinstance(size, (list, tuple)) else size)
    return 3, side, side


def longest_text(model: PreTrainedModel) -> int:
    """Return how many tokens a text may have, special tokens included."""
    text = model.config.text_config
    return int(text.max_position_embeddings - (text.pad_token_id + 1 if encoder_of(model).offset_positions else 0))


def unit_image_embeds(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return unit image features z, (batch, d) in float32.

    `pixel_values` has the shape (batch, 3, height, width), or holds `packed` images.
    """
    record = encoder_of(model)
    if record.image_only:
        return _unit(model(pixel_values=pixel_values).last_hidden_state[:, 0])
    inputs = unpacked(pixel_values) if record.patches else {"pixel_values": pixel_values}
    return _unit(model.get_image_features(**inputs))


def unit_text_embeds(model: Any, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return unit text embeddings e, (classes, d) in float32, from the output of `tokenize`."""
    record = encoder_of(model)
    # No dropout in the text tower: the text of a class has the same embedding at every step.
    with evaluating(model.get_submodule(record.text_tower or "")) if record.text_dropout else nullcontext():
        return _unit(model.get_text_features(**tokens))


def _unit(output: Any) -> torch.Tensor:
    return F.normalize(getattr(output, "pooler_output", output).float(), dim=-1)


def prompt_tokens(processor: Any, prompts: Sequence[str], model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt, or raise a `ValueError` if the text tower cannot encode a prompt."""
    check_encoder(model, text=True)
    longest = longest_text(model)
    for prompt in prompts:  # the model ignores everything after an end token
        for token in processor.tokenizer.all_special_tokens:
            if token in prompt:
                raise ValueError(f"prompt {prompt!r} contains {token!r}, a special token of the tokenizer: remove it")
    try:
        rows = processor.tokenizer(list(prompts))["input_ids"] if prompts else []
    except Exception as error:  # tokenizers raises a bare Exception, for example for an unknown character
        raise ValueError(f"the tokenizer cannot read one of the prompts {prompts!r:.200}: {error}") from error
    for prompt, ids in zip(prompts, rows, strict=True):
        if len(ids) > longest:
            raise ValueError(
                f"prompt {prompt!r} has {len(ids)} tokens, but the text tower takes at most {longest}: shorten it"
            )
    return [tuple(ids) for ids in rows]


def check_distinct(prompts: Iterable[str], tokens: Iterable[tuple[int, ...]]) -> None:
    """Raise a `ValueError` if two prompts give the same tokens."""
    seen: dict[tuple[int, ...], str] = {}
    for prompt, ids in zip(prompts, tokens, strict=True):
        if ids in seen:
            raise ValueError(f"prompts {seen[ids]!r} and {prompt!r} give the same tokens: rename a class")
        seen[ids] = prompt


def tokenize(processor: Any, prompts: Sequence[str], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the text tower's inputs for distinct prompts: token ids, (prompts, length), and a mask if needed."""
    rows = prompt_tokens(processor, prompts, model)
    check_distinct(prompts, rows)
    return padded_tokens(processor, rows, model)


def padded_tokens(processor: Any, rows: Iterable[Sequence[int]], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the text tower's inputs for token ids of different lengths, special tokens included."""
    record, longest = encoder_of(model), longest_text(model)
    options: dict[str, object] = {"max_length": longest} if record.padding == "max_length" else {}
    options |= {"padding": record.padding, "padding_side": record.padding_side, "return_tensors": "pt"}
    batch = processor.tokenizer.pad({"input_ids": [list(ids) for ids in rows]}, return_attention_mask=True, **options)
    # A causal tower never reads the padding after the end token, and SigLIP's was trained to read it: neither needs
    # a mask.
    names = ("input_ids", "attention_mask") if record.attention_mask else ("input_ids",)
    return {name: batch[name] for name in names}


_MOST_NORMALISED = 20  # normalised pixel values are seldom above 3


def pixel_values(processor: Any, image: Any) -> torch.Tensor:
    """Preprocess a PIL image to (3, height, width) or to a `packed` image; return a preprocessed tensor in float32."""
    if isinstance(image, torch.Tensor):
        if not image.is_floating_point() or image.ndim != 3 or image.shape[0] != 3:
            expected = "must be preprocessed, float (3, height, width); pass PIL images to have them preprocessed"
            raise ValueError(f"a tensor image {expected}, got {image.dtype} {tuple(image.shape)}")
        if not torch.isfinite(image).all():
            raise ValueError("a tensor image contains NaN or infinity")
        if image.abs().max() > _MOST_NORMALISED:
            warnings.warn(
                f"a tensor image has values up to {image.max():.4g}, but it must be preprocessed: normalised by the "
                "processor, not 0 to 255. Pass PIL images to have them preprocessed",
                stacklevel=2,
            )
        return image.float()
    if not isinstance(image, Image.Image):  # paths and URLs are never opened
        given = f"{image!r:.100}, a {type(image).__name__}"
        if hasattr(image, "__array_interface__"):
            given = f"a NumPy array of shape {image.shape}: PIL's Image.fromarray turns it into an image"
        raise TypeError(f"expected a PIL image or a preprocessed tensor, got {given}")
    inputs = processor.image_processor(images=image, return_tensors="pt")
    return packed(inputs) if "spatial_shapes" in inputs else inputs["pixel_values"][0]


def packed(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Pack the image processor's output for one image into (patches, 3 patch_size^2 + 2) in float32."""
    patches, grid = inputs["pixel_values"][0], inputs["spatial_shapes"][0]
    return torch.cat([patches, grid.expand(len(patches), 2)], dim=1)


def grids(images: torch.Tensor) -> torch.Tensor:
    """Return the height and width of each image's grid, (batch, 2) on the CPU.

    The grid is square for images that consist of zeros or are on the device "meta".
    """
    sides = torch.zeros(len(images), 2) if images.is_meta else images[:, 0, -2:].cpu()
    return sides.long().where(sides > 0, torch.tensor(math.isqrt(images.shape[1])))


def unpacked(images: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return the model's inputs for packed images, (batch, patches, columns), cut to the longest image.

    The mask is None if no image is padded.
    """
    shapes = grids(images)
    counts = shapes.prod(dim=1)
    most = int(counts.max())
    mask = torch.arange(most) < counts[:, None]
    return {
        "pixel_values": images[:, :most, :-2],
        "pixel_attention_mask": None if mask.all() else mask.to(images.device),
        "spatial_shapes": shapes,
    }
