"""OpenCLIP's ViT checkpoints in the layout of transformers.

    open_clip                                   transformers
    visual.conv1                                vision_model.embeddings.patch_embedding
    transformer.resblocks.0.attn.in_proj_weight text_model.encoder.layers.0.self_attn.{q,k,v}_proj.weight
    transformer.resblocks.0.mlp.c_fc            text_model.encoder.layers.0.mlp.fc1
    visual.proj (width, d)                      visual_projection.weight (d, width)

Sizes are read off the tensors; no tensor tells the number of heads and the activation.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from dulbe_peft.encoders.pixels import with_image_resize
from dulbe_peft.utils.folders import commit_folder
from dulbe_peft.utils.tensors import read_tensors

ACTIVATIONS = ("gelu", "quick_gelu")
# ViT-H, ViT-g and ViT-bigG have wider heads in their vision tower.
VISION_HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
# OpenAI's own checkpoints hold these three numbers beside the weights, and older ones the causal mask.
_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask")
_TOP = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
_TRANSPOSED = ("text_projection", "visual.proj")
_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TOWERS = {"visual.transformer": "vision_model.encoder", "transformer": "text_model.encoder"}
_IN_BLOCK = re.compile(r"((?:visual\.)?transformer)\.resblocks\.(\d+)\.(.+)")


def convert_open_clip(
    checkpoint: Mapping[str, torch.Tensor] | str | Path,
    activation: str = "gelu",
    vision_heads: int | None = None,
    text_heads: int | None = None,
) -> CLIPModel:
    """A CLIPModel in float32 with the weights of an open_clip ViT, in evaluation mode.

    `checkpoint` is a state dict or its file, read as tensors alone. `activation` is "gelu", or "quick_gelu" for
    OpenAI's weights. Heads default to a tower's width / 64, and to 16 in the vision towers of ViT-H, g and bigG.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    state = _weights(_read(checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint)
    config = _config(state, activation, vision_heads, text_heads)
    renamed: dict[str, torch.Tensor] = {}
    try:
        for name, tensor in state.items():
            renamed |= _renamed(name, tensor)
        with torch.device("meta"):  # no memory is taken before all shapes are known to fit
            CLIPModel(config).load_state_dict(renamed, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is not the whole state dict of an open_clip ViT: {error}") from error
    with torch.random.fork_rng(devices=[]):
        model = CLIPModel(config)
    model.load_state_dict(renamed)
    return model.eval()


def save_open_clip(
    checkpoint: Mapping[str, torch.Tensor] | str | Path,
    folder: str | Path,
    tokenizer: str | Path,
    resize: str = "crop",
    **facts: Any,
) -> CLIPModel:
    """Convert a checkpoint and write a folder that `load_clip` loads: model, tokenizer and image processor.

    `tokenizer` is a folder or Hub id with CLIP's tokenizer. `resize` "crop" resizes the short side and crops the
    centre; "squash" resizes the whole image to a square. `facts` go to `convert_open_clip`.
    """
    model: Any = convert_open_clip(checkpoint, **facts)
    reader: Any = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    vocabulary, end = model.config.text_config.vocab_size, model.config.text_config.eos_token_id
    if len(reader) != vocabulary or reader.eos_token_id != end:
        found = f"has {len(reader)} tokens and the end token {reader.eos_token_id}, the model {vocabulary} and {end}"
        raise ValueError(f"the tokenizer {str(tokenizer)!r} {found}: it is the tokenizer of another model")
    processor = with_image_resize(CLIPProcessor(CLIPImageProcessorPil(), reader), model, resize)

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)

    commit_folder(Path(folder), "export", write)
    return model


def _read(path: str | Path) -> Mapping[str, torch.Tensor]:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {str(path)!r} is no file")
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        reason = f"could not be read as tensors alone: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"checkpoint {str(path)!r} {reason}. Give a state dict, best in .safetensors") from error
    # open_clip's training writes its state dict beside the epoch and the optimiser's.
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint {str(path)!r} holds a {type(state).__name__}, expected names and tensors")
    return state


def _weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The weights in float32, without the prefix that data parallelism adds and without what is no weight."""
    weights = {}
    for name, tensor in state.items():
        name = name.removeprefix("module.")
        if name in _NO_WEIGHTS:
            continue
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise ValueError(f"entry {name!r} of the checkpoint must be a floating-point tensor, got {tensor!r:.100}")
        weights[name] = tensor.float()
    return weights


def _config(state: Mapping[str, torch.Tensor], activation: str, vision: int | None, text: int | None) -> Any:
    """The configuration that the tensors' shapes ask for."""
    width, channels, patch, _ = _shape(state, "visual.conv1.weight", 4)
    positions, _ = _shape(state, "visual.positional_embedding", 2)
    vocabulary, text_width = _shape(state, "token_embedding.weight", 2)
    context, _ = _shape(state, "positional_embedding", 2)
    _, features = _shape(state, "visual.proj", 2)
    side = round((positions - 1) ** 0.5)
    if side**2 != positions - 1:
        expected = "a square number of patches and one class token"
        raise ValueError(f"tensor 'visual.positional_embedding' has {positions} rows, expected {expected}")
    shared = {"hidden_act": activation, "projection_dim": features}
    return CLIPConfig(
        text_config={
            **shared,
            **_tower(state, "transformer", text_width, "text_heads", text),
            "vocab_size": vocabulary,
            "max_position_embeddings": context,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
            "pad_token_id": vocabulary - 1,
        },
        vision_config={
            **shared,
            **_tower(state, "visual.transformer", width, "vision_heads", vision),
            "num_channels": channels,
            "image_size": side * patch,
            "patch_size": patch,
        },
        projection_dim=features,
    )


def _shape(state: Mapping[str, torch.Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    shape = tuple(state[name].shape) if name in state else None
    if shape is None or len(shape) != dimensions:
        raise ValueError(f"{name!r} must be a tensor of {dimensions} dimensions in an open_clip ViT, found {shape}")
    return shape


def _tower(
    state: Mapping[str, torch.Tensor], name: str, width: int, argument: str, heads: int | None
) -> dict[str, int]:
    """The sizes of a tower. Its blocks are counted: the highest number among their names may be a huge one."""
    head_width = VISION_HEAD_WIDTHS.get(width, 64) if name.startswith("visual") else 64
    heads = max(1, width // head_width) if heads is None else heads
    if heads < 1 or width % heads:
        raise ValueError(f"{argument} is {heads}, which does not divide the tower's width of {width}")
    inner, _ = _shape(state, f"{name}.resblocks.0.mlp.c_fc.weight", 2)
    matches = (_IN_BLOCK.fullmatch(key) for key in state)
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": len({match[2] for match in matches if match and match[1] == name}),
        "num_attention_heads": heads,
    }


def _renamed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Names and tensors of transformers for one of open_clip's; the packed attention weight gives three."""
    if name in _TOP:
        return {_TOP[name]: tensor.T if name in _TRANSPOSED else tensor}
    match = _IN_BLOCK.fullmatch(name)
    if match:
        layer = f"{_TOWERS[match[1]]}.layers.{match[2]}"
        packed = re.fullmatch(r"attn\.in_proj_(weight|bias)", match[3])
        if packed:
            parts = zip("qkv", tensor.chunk(3))
            return {f"{layer}.self_attn.{part}_proj.{packed[1]}": rows for part, rows in parts}
        module, _, kind = match[3].rpartition(".")
        if module in _BLOCK and kind in ("weight", "bias"):
            return {f"{layer}.{_BLOCK[module]}.{kind}": tensor}
    raise ValueError(f"tensor {name!r} is unknown: the checkpoint is not the state dict of an open_clip ViT")
