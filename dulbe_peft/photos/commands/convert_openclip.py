"""example:
  dulbe-peft convert-openclip open_clip_model.safetensors openclip-vit-b-16 \\
      --tokenizer openai/clip-vit-base-patch16 --resize squash

CHECKPOINT is the state dict of an open_clip ViT. The sizes are read from its tensors; the activation and the
numbers of attention heads are not. By default, each tower has its width / 64 heads.
"""

from typing import Any, Literal

from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import check_given
from dulbe_peft.utils.settings import setting


@command()
def convert_openclip(
    checkpoint: str = setting(..., "open_clip's .safetensors file, or .bin or .pt with only tensors", place=True),
    output: str = setting(..., "folder for the model and its processor", place=True),
    tokenizer: str = setting(..., "folder or Hub id with CLIP's tokenizer: openai/clip-vit-base-patch16"),
    resize: Literal["crop", "squash"] = setting("crop", "crop the centre, or squash the whole image to a square"),
    activation: Literal["gelu", "quick_gelu"] = setting("gelu", "activation; OpenAI's weights need quick_gelu"),
    vision_heads: int | None = setting(None, "attention heads of the vision tower"),
    text_heads: int | None = setting(None, "attention heads of the text tower"),
) -> None:
    check_given(checkpoint=checkpoint)
    from dulbe_peft.encoders.openclip import save_open_clip

    facts = {"activation": activation, "vision_heads": vision_heads, "text_heads": text_heads}
    model: Any = save_open_clip(checkpoint, output, tokenizer, resize, **facts)
    vision, size = model.config.vision_config, model.config.vision_config.image_size
    for name, tower in (("images", vision), ("texts", model.config.text_config)):
        blocks = f"{tower.num_hidden_layers} blocks of width {tower.hidden_size}"
        print(f"{name}: {blocks}, {tower.num_attention_heads} heads, {tower.hidden_act}")
    print(f"{size} x {size} pixels, patches of {vision.patch_size}; features: {model.config.projection_dim}")
    print(f"written: {output}")
