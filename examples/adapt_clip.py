"""Adapt a CLIP model with PEFT, save the adapter, and load it over a pristine base model.

    python examples/adapt_clip.py --model openai/clip-vit-base-patch16 --output my-adapter

Without --model it takes the tiny CLIP that comes with the package, and its own images are handwritten digits.
"""

from __future__ import annotations

import argparse

import torch
from peft import PeftModel, get_peft_model

from dulbe_peft import DualModeLoraConfig, cross_modal_loss, load_clip
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.encoders.loading import tokenize, unit_image_embeds, unit_text_embeds
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.streams.digits import digit_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(demo_model_folder()))
    parser.add_argument("--output", default="my-adapter")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    clip, processor = load_clip(arguments.model)
    model = get_peft_model(clip, DualModeLoraConfig())
    model.print_trainable_parameters()

    task = digit_tasks(increment=10)[0]
    samples = [task.train[index] for index in range(128)]
    images = [sample["image"] for sample in samples]
    pixels = processor.image_processor(images=images, return_tensors="pt")["pixel_values"]
    labels = torch.tensor([sample["label"] for sample in samples])
    tokens = tokenize(processor, [f"a photo of the digit {name}." for name in DIGITS], clip)
    tau = clip.logit_scale.exp().item()

    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for step in range(arguments.steps):
        loss = cross_modal_loss(unit_image_embeds(clip, pixels), unit_text_embeds(clip, tokens), labels, tau)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4f}")

    model.save_pretrained(arguments.output)
    loaded = PeftModel.from_pretrained(load_clip(arguments.model)[0], arguments.output)
    with torch.no_grad():
        same = torch.equal(
            unit_image_embeds(loaded.get_base_model(), pixels), unit_image_embeds(model.get_base_model(), pixels)
        )
    print(f"the loaded adapter gives the same features: {same}")


if __name__ == "__main__":
    main()
