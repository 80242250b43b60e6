"""Convert OpenCLIP's ViT checkpoints to the layout of transformers.

Sizes are read from the tensors' shapes. The number of heads and the activation are arguments: no tensor shows them.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from dulbe_peft.encoders.pixels import with_image_resize
from dulbe_peft.utils.files import plain_reason
from dulbe_peft.utils.folders import commit_folder
from dulbe_peft.utils.tensors import read_tensors

ACTIVATIONS = ("gelu", "quick_gelu")
# Width of a tower -> width of its heads: the vision towers of ViT-H, ViT-g and ViT-bigG have wider heads.
VISION_HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
# OpenAI's checkpoints contain these three numbers beside the weights, and older ones also the causal mask.
_NO_WEIGHTS = ("input_resolution", "context_length", "vocab_size", "attn_mask")
# Parts of OpenCLIP's names, and what transformers calls them. They are replaced in this order.
_NAMES = {
    "visual.transformer.resblocks": "vision_model.encoder.layers",
    "transformer.resblocks": "text_model.encoder.layers",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1": "vision_model.embeddings.patch_embedding",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
    "visual.proj": "visual_projection.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding": "text_model.embeddings.token_embedding",
    "ln_final": "text_model.final_layer_norm",
    "text_projection": "text_projection.weight",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.": "self_attn.",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_TRANSPOSED = ("text_projection.weight", "visual_projection.weight")


def convert_open_clip(
    checkpoint: Mapping[str, torch.Tensor] | str | Path,
    activation: str = "gelu",
    vision_heads: int | None = None,
    text_heads: int | None = None,
) -> CLIPModel:
    """Return a CLIPModel with the weights of an open_clip ViT, in float32 and evaluation mode.

    Args:
        checkpoint: State dict, or the file that contains it. Only tensors are read from a file.
        activation: "gelu", or "quick_gelu" for OpenAI's weights.
        vision_heads: Attention heads of the vision tower. None: width / 64, and 16 for ViT-H, ViT-g and ViT-bigG.
        text_heads: Attention heads of the text tower. None: width / 64.

    Raises:
        FileNotFoundError: If `checkpoint` is not a file.
        ValueError: If `checkpoint` is not the complete state dict of an open_clip ViT, or does not fit the arguments.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    state = _weights(checkpoint)
    config = _config(state, activation, vision_heads, text_heads)
    renamed = {name: rows for item in state.items() for name, rows in _renamed(*item).items()}
    try:
        with torch.device("meta"):  # allocates no memory before all shapes are known to fit
            CLIPModel(config).load_state_dict(renamed, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is not the complete state dict of an open_clip ViT: {error}") from error
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
    """Convert a checkpoint, and write a folder with model, tokenizer and image processor that `load_clip` loads.

    Args:
        checkpoint: As in `convert_open_clip`.
        folder: Folder to write.
        tokenizer: Folder or Hub id with CLIP's tokenizer.
        resize: "crop" resizes the short side and crops the centre; "squash" resizes the whole image to a square.
        facts: Further arguments of `convert_open_clip`.

    Returns:
        The converted model.

    Raises:
        ValueError: If the tokenizer does not belong to the model, or see `convert_open_clip`.
    """
    model: Any = convert_open_clip(checkpoint, **facts)
    reader: Any = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    vocabulary, end = model.config.text_config.vocab_size, model.config.text_config.eos_token_id
    if len(reader) != vocabulary or reader.eos_token_id != end:
        given = f"has {len(reader)} tokens and the end token {reader.eos_token_id}"
        raise ValueError(
            f"the tokenizer {str(tokenizer)!r} {given}, but the model has {vocabulary} and {end}: "
            "it is the tokenizer of another model"
        )
    processor = with_image_resize(CLIPProcessor(CLIPImageProcessorPil(), reader), model, resize)

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)

    commit_folder(Path(folder), "export", write)
    return model


def _weights(checkpoint: Mapping[str, Any] | str | Path) -> dict[str, torch.Tensor]:
    """Return the weights in float32, without other entries, and without the prefix that data parallelism adds."""
    state = _read(Path(checkpoint)) if isinstance(checkpoint, (str, Path)) else checkpoint
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    for name, tensor in state.items():
        if name not in _NO_WEIGHTS and not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point()):
            raise ValueError(f"entry {name!r} of the checkpoint must be a floating-point tensor, got {tensor!r:.100}")
    return {name: tensor.float() for name, tensor in state.items() if name not in _NO_WEIGHTS}


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {str(path)!r} is not a file")
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        reason = f"cannot be read as plain tensors: {plain_reason(error).partition(chr(10))[0]}"
        raise ValueError(f"checkpoint {str(path)!r} {reason}. Pass a state dict, best as .safetensors") from error
    # open_clip's training saves the state dict beside the epoch and the state of the optimiser.
    state = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint {str(path)!r} contains a {type(state).__name__}, expected a dict of tensors")
    return state


def _config(state: Mapping[str, torch.Tensor], activation: str, vision: int | None, text: int | None) -> Any:
    """Return the configuration of the model to which the tensors' shapes belong."""
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
    text_config = shared | _tower(state, "transformer", text_width, "text_heads", text)
    text_config |= {"vocab_size": vocabulary, "max_position_embeddings": context, "bos_token_id": vocabulary - 2}
    text_config |= {"eos_token_id": vocabulary - 1, "pad_token_id": vocabulary - 1}
    vision_config = shared | _tower(state, "visual.transformer", width, "vision_heads", vision)
    vision_config |= {"num_channels": channels, "image_size": side * patch, "patch_size": patch}
    return CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=features)


def _shape(state: Mapping[str, torch.Tensor], name: str, dimensions: int) -> tuple[int, ...]:
    shape = tuple(state[name].shape) if name in state else None
    if shape is None or len(shape) != dimensions:
        given = "it is missing" if shape is None else f"got the shape {shape}"
        raise ValueError(f"{name!r} must be a tensor of {dimensions} dimensions in an open_clip ViT, but {given}")
    return shape


def _tower(
    state: Mapping[str, torch.Tensor], name: str, width: int, argument: str, heads: int | None
) -> dict[str, int]:
    """Return the sizes of a tower. Blocks are counted, since a damaged file may have a huge number in a name."""
    head_width = VISION_HEAD_WIDTHS.get(width, 64) if name.startswith("visual") else 64
    heads = max(1, width // head_width) if heads is None else heads
    if heads < 1 or width % heads:
        raise ValueError(f"{argument} is {heads}, which does not divide the tower's width of {width}")
    inner, _ = _shape(state, f"{name}.resblocks.0.mlp.c_fc.weight", 2)
    blocks = {key.split(".resblocks.")[1].partition(".")[0] for key in state if key.startswith(f"{name}.resblocks.")}
    sizes = {"hidden_size": width, "intermediate_size": inner}
    return sizes | {"num_hidden_layers": len(blocks), "num_attention_heads": heads}


def _renamed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return one of open_clip's tensors under transformers' name; the packed attention weight becomes three."""
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    layer, packed, kind = name.partition(".in_proj_")
    if packed:
        return {f"{layer}.{part}_proj.{kind}": rows for part, rows in zip("qkv", tensor.chunk(3))}
    return {name: tensor.T if name in _TRANSPOSED else tensor}
