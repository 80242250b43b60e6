"""`dulbe-peft convert-openclip`: an OpenCLIP checkpoint as a folder that `--model` takes."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLE = """example:
  dulbe-peft convert-openclip open_clip_model.safetensors openclip-vit-b-16 \\
      --tokenizer openai/clip-vit-base-patch16 --resize squash

CHECKPOINT is the state dict of an open_clip ViT. Its tensors tell the sizes. They do not tell the activation, nor the
number of heads: those of the towers are their widths / 64 unless you give others.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "convert-openclip", help="bring an OpenCLIP checkpoint into the layout of transformers", epilog=EXAMPLE
    )
    parser.add_argument("checkpoint", help="open_clip's .safetensors file, or .bin or .pt with tensors alone")
    parser.add_argument("output", help="folder for the model and its processor")
    parser.add_argument(
        "--tokenizer", required=True, help="folder or Hub id with CLIP's tokenizer: openai/clip-vit-base-patch16"
    )
    parser.add_argument(
        "--resize",
        choices=("crop", "squash"),
        default="crop",
        help="short side to size and centre crop, or the whole image to a square (%(default)s)",
    )
    parser.add_argument(
        "--activation",
        choices=("gelu", "quick_gelu"),
        default="gelu",
        help="quick_gelu is for OpenAI's weights (%(default)s)",
    )
    parser.add_argument("--vision-heads", type=int, help="attention heads of the vision tower")
    parser.add_argument("--text-heads", type=int, help="attention heads of the text tower")
    parser.set_defaults(call=convert)


def convert(arguments: argparse.Namespace) -> int:
    """Write the folder."""
    from dulbe_peft.encoders.openclip import save_open_clip

    model: Any = save_open_clip(
        arguments.checkpoint,
        arguments.output,
        arguments.tokenizer,
        arguments.resize,
        activation=arguments.activation,
        vision_heads=arguments.vision_heads,
        text_heads=arguments.text_heads,
    )
    vision, text = model.config.vision_config, model.config.text_config
    print(
        f"images: {vision.image_size} x {vision.image_size}, patches of {vision.patch_size}, "
        f"{vision.num_hidden_layers} blocks of width {vision.hidden_size}, {vision.num_attention_heads} heads"
    )
    print(
        f"texts: {text.max_position_embeddings} tokens of {text.vocab_size}, {text.num_hidden_layers} blocks of width "
        f"{text.hidden_size}, {text.num_attention_heads} heads"
    )
    print(f"features: {model.config.projection_dim}; activation: {vision.hidden_act}")
    print(f"written: {arguments.output}")
    return 0
