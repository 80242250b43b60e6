"""Pretrain the tiny CLIP that ``dulbe-peft demo`` carries, from rendered glyphs and captions alone.

```
fonts --render--> glyph bank --stroke, warp, 8x8--> images --\
                                                              symmetric contrastive loss, duplicates share a caption
concepts --templates--> "a photo of the digit three" --------/
```

The handwritten digits of scikit-learn are what the demo learns, so they never enter here: not in training, not in the
choice of a setting (held-out font families serve for that). They are only measured, once, after the last step.

    python examples/pretrain_demo_clip.py --out dulbe_peft/assets/demo_clip      # train, measure, write the folder
    python examples/pretrain_demo_clip.py --evaluate dulbe_peft/assets/demo_clip  # measure a folder again

The result depends on the fonts, the seed and the number of threads only. Any TrueType or OpenType fonts do; the model
card lists the families that the shipped folder saw, all of them from Debian's ``fonts-*`` packages and matplotlib.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_glyphs import DIGIT_WORDS, IMAGE_SIZE, GlyphBank, batches, concepts, load_fonts
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

SYSTEM_FONTS = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), Path("~/.fonts").expanduser())
TEMPLATES = (
    "a photo of the {}", "a photo of a {}", "a photo of the {}.", "a photo of a {}.", "a picture of the {}",
    "an image of the {}", "a drawing of the {}", "a sketch of a {}", "a handwritten {}", "a printed {}",
    "a blurry photo of the {}", "a low resolution photo of a {}", "a black and white photo of the {}", "the {}", "{}",
)  # fmt: skip
ZERO_SHOT_TEMPLATE = "a photo of the digit {}"


def learn_merges(captions: list[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make one token of every word: the commonest pair first, ties in alphabetical order."""
    counts = Counter(word for caption in captions for word in re.findall(r"[a-z]+|[0-9]|[^\sa-z0-9]+", caption))
    words = [([*word[:-1], word[-1] + "</w>"], count) for word, count in counts.items()]
    merges = []
    while any(len(parts) > 1 for parts, _ in words):
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, count in words:
            for pair in pairwise(parts):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts, _ in words:
            for i in range(len(parts) - 2, -1, -1):
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = ["".join(best)]
    return merges


def train_tokenizer(captions: list[str]) -> CLIPTokenizer:
    """A CLIP tokenizer that knows every word of `captions`; other words fall back to letters and bytes."""
    merges = learn_merges(captions)
    alphabet = sorted(ByteLevel.alphabet())
    tokens = alphabet + [c + "</w>" for c in alphabet] + ["".join(pair) for pair in merges]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    # The annotation asks for strings, the tokenizers library underneath for pairs.
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)  # type: ignore[arg-type]


def build_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    """An untrained CLIP, 1.8 MB of float32: 16 patches of 4 x 4 pixels, four vision layers 96 wide, two text ones."""
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    special["pad_token_id"] = tokenizer.pad_token_id
    text = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 144, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "max_position_embeddings": 77, "projection_dim": 64, **special}
    vision = {"image_size": IMAGE_SIZE, "patch_size": 4, "hidden_size": 96, "intermediate_size": 256}
    vision |= {"num_hidden_layers": 4, "num_attention_heads": 4, "projection_dim": 64}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64))


def image_processor() -> CLIPImageProcessorPil:
    """Bicubic to 16 x 16 pixels, values to [-1, 1]."""
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    return CLIPImageProcessorPil(size=square, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def contrastive_loss(
    image_embeds: torch.Tensor, text_embeds: torch.Tensor, targets: torch.Tensor, logit_scale: torch.Tensor
) -> torch.Tensor:
    """CLIP's symmetric loss where several images may share one caption.

    Args:
        image_embeds: (n, d).
        text_embeds: (m, d), one row for each distinct caption.
        targets: (n,) int64, the row of each image's caption.
        logit_scale: Logarithm of the inverse temperature.
    """
    logits = logit_scale.exp() * F.normalize(image_embeds, dim=-1) @ F.normalize(text_embeds, dim=-1).T
    positives = F.one_hot(targets, len(text_embeds)).float()
    share = positives / positives.sum(dim=0, keepdim=True)  # a caption is right for all of its images alike
    text_loss = -(share * F.log_softmax(logits, dim=0)).sum(dim=0).mean()
    return (F.cross_entropy(logits, targets) + text_loss) / 2


def pretrain(
    model: CLIPModel, tokenizer: CLIPTokenizer, bank: GlyphBank, steps: int, batch_size: int, rate: float, seed: int
) -> None:
    """Train `model` in place: AdamW, linear warm-up, cosine decay."""
    generator = torch.Generator().manual_seed(seed)
    known = concepts()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    warmup = max(1, min(100, steps // 10))
    started, average = time.perf_counter(), math.nan
    stream = batches(bank, batch_size, generator)
    model.train()
    for step in range(steps):
        factor = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        pixels, concept = next(stream)
        present, targets = concept.unique(return_inverse=True)
        picks = torch.randint(10**6, (len(present), 2), generator=generator).tolist()
        names = [known[i].names[a % len(known[i].names)] for i, (a, _) in zip(present.tolist(), picks, strict=True)]
        captions = [TEMPLATES[b % len(TEMPLATES)].format(n) for n, (_, b) in zip(names, picks, strict=True)]
        text = tokenizer(captions, padding=True, return_tensors="pt")
        outputs = model(pixel_values=pixels, **text)
        loss = contrastive_loss(outputs.image_embeds, outputs.text_embeds, targets, model.logit_scale)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100))
        average = loss.item() if math.isnan(average) else 0.98 * average + 0.02 * loss.item()
        if step % 100 == 99 or step == steps - 1:
            print(f"step {step + 1}/{steps} loss {average:.3f} {time.perf_counter() - started:.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def classify(model: CLIPModel, tokenizer: CLIPTokenizer, pixels: torch.Tensor, captions: list[str]) -> torch.Tensor:
    """(n,) index of the caption nearest to each image."""
    text = tokenizer(captions, padding=True, return_tensors="pt")
    return model(pixel_values=pixels, **text).logits_per_image.argmax(dim=-1)


def measure_glyphs(model: CLIPModel, tokenizer: CLIPTokenizer, bank: GlyphBank, n: int = 4000) -> dict[str, float]:
    """Zero-shot accuracy on glyphs of `bank`, per cent: among all concepts, and digits among digits."""
    pixels, concept = next(batches(bank, n, torch.Generator().manual_seed(1)))
    captions = [f"a photo of the {c.names[0]}" for c in concepts()]
    whole = (classify(model, tokenizer, pixels, captions) == concept).float().mean().item()
    is_digit = concept < 10
    digits = classify(model, tokenizer, pixels[is_digit], captions[:10]) == concept[is_digit]
    return {"all concepts": 100 * whole, "digits": 100 * digits.float().mean().item()}


@torch.no_grad()
def measure_digits(folder: Path) -> dict[str, float]:
    """Accuracy on scikit-learn's handwritten digits, per cent, through the files of `folder` alone.

    Zero-shot is over all 1,797 digits. The two probes fit frozen image embeddings on a stratified 75 % (seed 0).
    """
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import train_test_split
    from sklearn.neighbors import NearestCentroid

    model, tokenizer = CLIPModel.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    digits = load_digits()
    images = [Image.fromarray((image / 16 * 255).astype(np.uint8)).convert("RGB") for image in digits.images]
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")["pixel_values"]
    captions = [ZERO_SHOT_TEMPLATE.format(word) for word in DIGIT_WORDS]
    predicted = classify(model, tokenizer, pixels, captions).numpy()
    embeds = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=-1).numpy()
    x, x_test, y, y_test = train_test_split(
        embeds, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    return {
        "zero-shot": 100 * float((predicted == digits.target).mean()),
        "nearest class mean": 100 * NearestCentroid().fit(x, y).score(x_test, y_test),
        "linear probe": 100 * LogisticRegression(C=100.0, max_iter=1000).fit(x, y).score(x_test, y_test),
    }


CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: zero-shot-image-classification
tags: [clip]
---
# Tiny glyph CLIP

A CLIP of {parameters:,} parameters that `dulbe-peft demo` adapts on the CPU. It knows printed digits, letters and a
few symbols from captions such as "{caption}"; it is a fixture for demonstrations and tests and
good for nothing else.

## How it was trained

    {command}

took {seconds:.0f} s on {threads} CPU thread(s): {steps} steps of {batch_size} rendered glyphs, contrastive loss, from
scratch. The images are {faces} font faces of {families} families (every family drawn equally often), with varied
stroke thickness, affine and elastic warps, contrast and noise. Three quarters of them are reduced to 8 x 8 pixels by
averaging 4 x 4 blocks of a 32 x 32 rendering, which is how scikit-learn's documentation says its digits were made. One
image in ten is dark on bright ground. The captions are {templates} templates around names like "digit three",
"capital letter b" or "plus sign". The learning rate was chosen on
{held_families} families that were held out; a few of those have a close relative among the trained ones.
**No handwritten digit was used in training or in choosing a setting.**

## What was measured

| images | accuracy, per cent |
|---|---|
| held-out font families, augmented as in training, zero-shot among all {concepts} concepts | {glyphs_all:.1f} |
| held-out font families, zero-shot, digits among digits | {glyphs_digits:.1f} |
{rows}

The lines on scikit-learn's digits come from `python examples/pretrain_demo_clip.py --evaluate FOLDER`. Zero-shot is
over all 1,797 images with captions such as "{zero_shot}". The two probes fit frozen image embeddings
on a stratified 75 % (seed 0) and are measured on the other 25 %.

## Files

`CLIPModel.from_pretrained(FOLDER)` and `AutoProcessor.from_pretrained(FOLDER)` load it offline, with or without
torchvision. Weights are float32. Images are resized to 16 x 16 pixels and scaled to [-1, 1].

## Licence

Apache-2.0. The fonts only drew the training images; they keep their own licences and are not redistributed here.

Families trained on: {names}.

Families held out: {held_names}.
"""


def write_card(folder: Path, facts: dict[str, object], glyphs: dict[str, float], digits: dict[str, float]) -> None:
    """Write `folder`/README.md."""
    rows = "\n".join(f"| scikit-learn's handwritten digits, {name} | {value:.1f} |" for name, value in digits.items())
    text = CARD.format(rows=rows, glyphs_all=glyphs["all concepts"], glyphs_digits=glyphs["digits"], **facts)
    (folder / "README.md").write_text(text, encoding="utf-8")


def default_fonts() -> list[Path]:
    """matplotlib's bundled fonts, where it is installed, and the system's."""
    folders = list(SYSTEM_FONTS)
    try:
        import matplotlib
    except ImportError:
        pass
    else:
        folders.insert(0, Path(matplotlib.get_data_path()) / "fonts" / "ttf")
    return [folder for folder in folders if folder.is_dir()]


def build(args: argparse.Namespace) -> None:
    """Render, train, save, measure."""
    if args.steps < 1 or args.batch_size < 2:
        raise ValueError(f"--steps is {args.steps}, --batch-size {args.batch_size}; need at least 1 and 2")
    started = time.perf_counter()
    known = concepts()
    train, held = load_fonts(args.fonts or default_fonts(), "".join(c.character for c in known)).split()
    print(f"{len(train.families)} font faces to train on, {len(held.families)} held out")
    captions = [template.format(name) for c in known for name in c.names for template in TEMPLATES]
    tokenizer = train_tokenizer(captions)
    torch.manual_seed(args.seed)
    model = build_model(tokenizer)
    pretrain(model, tokenizer, train, args.steps, args.batch_size, args.learning_rate, args.seed)
    for part in (model, tokenizer, image_processor()):
        part.save_pretrained(args.out)
    seconds = time.perf_counter() - started
    glyphs, digits = measure_glyphs(model, tokenizer, held), measure_digits(args.out)
    report("held-out fonts", glyphs)
    report("handwritten digits", digits)
    names, held_names = sorted(set(train.families)), sorted(set(held.families))
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()), "caption": captions[0], "seconds": seconds,
        "command": f"python examples/pretrain_demo_clip.py --steps {args.steps} --seed {args.seed}",
        "threads": args.threads, "steps": args.steps, "batch_size": args.batch_size, "faces": len(train.families),
        "families": len(names), "held_families": len(held_names), "templates": len(TEMPLATES),
        "concepts": len(known), "zero_shot": ZERO_SHOT_TEMPLATE.format("three"),
        "names": ", ".join(names), "held_names": ", ".join(held_names),
    }  # fmt: skip
    write_card(args.out, facts, glyphs, digits)


def report(title: str, accuracies: dict[str, float]) -> None:
    """Print one line of accuracies."""
    print(f"{title}: " + ", ".join(f"{name} {value:.1f}" for name, value in accuracies.items()))


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Pretrain the tiny CLIP of `dulbe-peft demo` on rendered glyphs.")
    parser.add_argument("--out", type=Path, default=Path("demo_clip"), help="folder to write (default: demo_clip)")
    parser.add_argument("--steps", type=int, default=1800, help="optimiser steps (default: 1800)")
    parser.add_argument("--batch-size", type=int, default=256, help="glyphs a step (default: 256)")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3, help="peak learning rate (default: 2.5e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and images (default: 0)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    fonts_help = "folders searched for .ttf and .otf files (default: matplotlib's fonts and the system's)"
    parser.add_argument("--fonts", type=Path, nargs="+", metavar="DIR", help=fonts_help)
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="only measure this folder on the digits")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.evaluate is not None:
        report("handwritten digits", measure_digits(args.evaluate))
    else:
        build(args)


if __name__ == "__main__":
    main()
